"""Accepts drafted tokens so that what is emitted has exactly the target's distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register
from specdec_kernels.ops._checks import FLOATS, expect, expect_no_grad
from specdec_kernels.ops.rejection_sample import reference
from specdec_kernels.ops.sample import dense_rows, expect_sampling, expect_vocabulary
from specdec_kernels.ops.verify_greedy import expect_window, new_acceptance
from specdec_kernels.tree import Acceptance, SamplingParams

__all__ = ["RULES", "rejection_sample"]

RULES = ("coupled", "token")


def rejection_sample(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    parents: Tensor,
    num_nodes: Tensor,
    sampling: SamplingParams,
    *,
    draft_logits: Tensor | None = None,
    draft_vocab_map: Tensor | None = None,
    rule: str,
    backend: str | None = None,
) -> Acceptance:
    """Verifies a drafted window against raw target logits under the row's sampling settings.

    Rule `coupled`: the target token of each node is what `sample` draws there with the same seed
    and position; a child is accepted when it equals it. The text is that of undrafted sampling.

    Rule `token`: a child drawn from q is accepted with min(1, p/q), else the recovered token comes
    from norm(max(p - q, 0)) (Leviathan et al. 2023). Without `draft_logits` q is one-hot: siblings
    are tried in slot order, each against the target without those already rejected.

    The rows follow `sample` in everything: processing order, ties, NaN, infinities. A draft token
    of probability 0 or outside the vocabulary is never accepted; an empty residual samples the
    target. A NaN or empty draft row rejects its child and sets the status.

    Args:
        target_logits: raw target logits [B, T, V], fp32, bf16 or fp16.
        draft_token_ids, parents, num_nodes: the verify window, int64 [B, T], int32 [B, T] and
            int32 [B].
        sampling: one value per row; `position` is that of the token decided at the root.
        draft_logits: [B, T, Vd]; row i are the logits whose softmax slot i's child was drawn from.
            Chains only; not read under `coupled`.
        draft_vocab_map: target id of each draft id, distinct, int64 [Vd]; None means equal ids.
        rule: "coupled" or "token".
        backend: reference or cpu; None picks.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Equivalent to (`token`, one drafted token, in distribution)::

        p, q = softmax(target_logits[0, 0]), softmax(draft_logits[0, 0])
        if rand() * q[x] < p[x]: x, then multinomial(softmax(target_logits[0, 1]), 1)
        else: multinomial((p - q).clamp(min=0), 1)
    """
    op = "rejection_sample"
    sizes: dict[str, int] = {}
    if rule not in RULES:
        raise ValueError(f"{op}: expected rule as one of {', '.join(RULES)}, got {rule!r}")
    expect(op, "target_logits", target_logits, "B, T, V", FLOATS, sizes)
    expect_vocabulary(op, target_logits)
    expect_window(op, draft_token_ids, parents, num_nodes, sizes, target_logits)
    expect_sampling(op, sampling, "B", sizes, target_logits)
    if draft_vocab_map is not None and draft_logits is None:
        raise ValueError(f"{op}: expected draft_logits with draft_vocab_map, got None")
    if draft_logits is not None:
        expect(op, "draft_logits", draft_logits, "B, T, Vd", FLOATS, sizes, target_logits)
        expect_vocabulary(op, draft_logits)
        draft_logits = dense_rows(draft_logits)
    if draft_vocab_map is not None:
        like = target_logits
        expect(op, "draft_vocab_map", draft_vocab_map, "Vd", (torch.int64,), sizes, like)
    expect_no_grad(op, target_logits, draft_logits)
    outputs = _op(
        dense_rows(target_logits),
        draft_token_ids,
        parents,
        num_nodes,
        *sampling[:6],
        None if rule == "coupled" else draft_logits,
        None if rule == "coupled" else draft_vocab_map,
        rule,
        backend=backend or "",
    )
    return Acceptance(*outputs)


def _cpu(
    target_logits, draft_token_ids, parents, num_nodes, temperature, top_k, top_p, min_p, seed,
    position, draft_logits, draft_vocab_map, rule,
):  # fmt: skip
    if draft_logits is not None:
        reference.expect_chains(parents, num_nodes)
    outputs = new_acceptance(draft_token_ids)
    window = [x.contiguous() for x in (draft_token_ids, parents, num_nodes)]
    params = [x.contiguous() for x in (temperature, top_k, top_p, min_p, seed, position)]
    vocab_map = None if draft_vocab_map is None else draft_vocab_map.contiguous()
    native.cpu.rejection_sample(
        target_logits, window, params, draft_logits, vocab_map, rule == "coupled", outputs,
        native.num_threads(),
    )  # fmt: skip
    return outputs


def _reference(*args):
    return tuple(reference.rejection_sample(*args))


def _fake(target_logits, draft_token_ids, *args):
    return new_acceptance(draft_token_ids)


_op = register(
    "rejection_sample",
    "(Tensor target_logits, Tensor draft_token_ids, Tensor parents, Tensor num_nodes, "
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor position, "
    "Tensor? draft_logits, Tensor? draft_vocab_map, str rule, *, str backend='') "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    {"cpu": _cpu, "reference": _reference},
    _fake,
)
