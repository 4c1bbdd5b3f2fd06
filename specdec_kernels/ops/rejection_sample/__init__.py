"""Accepts drafted tokens so that what is emitted has exactly the target's distribution."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register
from specdec_kernels.ops._checks import FLOATS, expect, expect_no_grad
from specdec_kernels.ops.rejection_sample import reference
from specdec_kernels.ops.sample import (
    SAMPLING_SCHEMA,
    contiguous_sampling,
    dense_rows,
    expect_sampling,
    expect_vocabulary,
)
from specdec_kernels.ops.verify_greedy import expect_window, new_acceptance
from specdec_kernels.tree import Acceptance, SamplingParams

__all__ = ["RULES", "block_position", "rejection_sample"]

RULES = ("auto", "coupled", "token", "recursive", "block", "typical")
NATIVE_RULES = ("coupled", "recursive", "block", "typical")  # enum class Rule


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
    posterior_threshold: float = 0.09,
    posterior_alpha: float = 0.3,
    backend: str | None = None,
) -> Acceptance:
    """Verifies a drafted window against raw target logits under the row's sampling settings.

    All rules but `typical` emit exactly the target's distribution, p below:

    - `coupled`: the target token of each node is what `sample` draws there with the same seed and
      position; a child is accepted when it equals it. The text is that of undrafted sampling.
    - `token`: a child drawn from q is accepted with min(1, p/q), else the recovered token comes
      from norm(max(p - q, 0)) (Leviathan et al. 2023). Chains.
    - `recursive`: the same for siblings drawn without replacement, in slot order: each is held
      against what the rejected ones left, p <- norm(max(p - q, 0)), q without the tried token
      (Jeon et al. 2024). On chains it is `token`.
    - `block`: a chain is accepted as a whole, which keeps more (Sun et al. 2024). Its random
      numbers, and those of its drafts, must be counted by `step`: draw the draft of depth i with
      position `block_position(step, i)`. Chains.
    - `typical`: lossy. A child stands when p > min(posterior_threshold, posterior_alpha
      exp(-entropy of p)); the deepest node that stands is kept (Cai et al., Medusa, 2024).
    - `auto`: `coupled` without draft_logits, else `recursive`.

    Without `draft_logits` q is one-hot: the drafts are taken for deterministic.

    The rows follow `sample` in everything: processing order, ties, NaN, infinities. A draft token
    of probability 0 or outside the vocabulary is never accepted; an empty residual samples the
    target. A NaN or empty draft row rejects its children and sets the status.

    Args:
        target_logits: raw target logits [B, T, V], fp32, bf16 or fp16.
        draft_token_ids, parents, num_nodes: the verify window, int64 [B, T], int32 [B, T] and
            int32 [B].
        sampling: one value per row; `position` is that of the token decided at the root.
        draft_logits: [B, T, Vd]; row i are the logits whose softmax slot i's children were drawn
            from. Not read under `coupled` and `typical`.
        draft_vocab_map: target id of each draft id, distinct, int64 [Vd]; None means equal ids.
        rule: one of RULES.
        posterior_threshold, posterior_alpha: see `typical`.
        backend: reference, cpu or cuda; None picks.

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
    expect_sampling(op, sampling, "B, T", sizes, target_logits)
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
    if rule in ("coupled", "typical"):
        draft_logits = draft_vocab_map = None
    outputs = _op(
        dense_rows(target_logits),
        draft_token_ids,
        parents,
        num_nodes,
        *sampling,
        draft_logits,
        draft_vocab_map,
        rule,
        posterior_threshold,
        posterior_alpha,
        backend=backend or "",
    )
    return Acceptance(*outputs)


def block_position(step: Tensor, depth: int) -> Tensor:
    """The `position` with which a draft for rule `block` is drawn, depth levels below the root."""
    return step + (depth << 32)


def _cpu(target_logits, draft_token_ids, parents, num_nodes, *args):
    *fields, draft_logits, vocab_map, rule, threshold, alpha = args
    rule = reference.resolve(rule, draft_logits)
    reference.expect_chains(rule, parents, num_nodes, draft_logits is not None)
    outputs = new_acceptance(draft_token_ids)
    window = [x.contiguous() for x in (draft_token_ids, parents, num_nodes)]
    native.cpu.rejection_sample(
        target_logits,
        window,
        contiguous_sampling(fields),
        draft_logits,
        None if vocab_map is None else vocab_map.contiguous(),
        NATIVE_RULES.index("recursive" if rule == "token" else rule),
        threshold,
        alpha,
        outputs,
        native.num_threads(),
    )
    return outputs


def _cuda(target_logits, draft_token_ids, parents, num_nodes, *args):
    *fields, draft_logits, vocab_map, rule, threshold, alpha = args
    rule = reference.resolve(rule, draft_logits)
    if target_logits.is_cpu:  # emulated; to look into a CUDA tensor would wait for the device
        reference.expect_chains(rule, parents, num_nodes, draft_logits is not None)
    outputs = new_acceptance(draft_token_ids)
    call = (
        target_logits,
        [x.contiguous() for x in (draft_token_ids, parents, num_nodes)],
        contiguous_sampling(fields),
        draft_logits,
        None if vocab_map is None else vocab_map.contiguous(),
        NATIVE_RULES.index("recursive" if rule == "token" else rule),
        threshold,
        alpha,
        outputs,
    )
    workspace = draft_token_ids.new_zeros(native.cuda.rejection_sample_workspace(*call))
    launch = native.cuda_launch(target_logits)
    native.cuda.rejection_sample(*call, workspace, *launch)
    return outputs


def _reference(target_logits, draft_token_ids, parents, num_nodes, *args):
    *fields, draft_logits, vocab_map, rule, threshold, alpha = args
    window = (target_logits, draft_token_ids, parents, num_nodes)
    return tuple(
        reference.rejection_sample(
            *window, SamplingParams(*fields), draft_logits, vocab_map, rule, threshold, alpha
        )
    )


def _fake(target_logits, draft_token_ids, *args):
    return new_acceptance(draft_token_ids)


_op = register(
    "rejection_sample",
    "(Tensor target_logits, Tensor draft_token_ids, Tensor parents, Tensor num_nodes, "
    f"{SAMPLING_SCHEMA}, Tensor? draft_logits, Tensor? draft_vocab_map, str rule, "
    "float posterior_threshold, float posterior_alpha, *, str backend='') "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    {"cpu": _cpu, "reference": _reference, "cuda": _cuda},
    _fake,
)
