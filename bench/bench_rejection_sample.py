"""rejection_sample, rule by rule, against batched PyTorch and transformers' function.

`bytes` counts every row of logits once. We and torch_batched stop where the accepted path does, so
`visited_bytes` says what the outcomes need, and so does the share of the arithmetic roof, for the
rule that does little but draw random numbers. The drafts are accepted about 7 times out of 10.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from bench import torch_sampling, windows
from bench.harness import Case, Function, Options
from bench.machine import transformers_version
from bench.torch_sampling import Emitted
from bench.windows import Window
from specdec_kernels.ops import rejection_sample
from specdec_kernels.ops.rejection_sample import reference
from specdec_kernels.ops.sample.reference import prepare
from specdec_kernels.tree import Acceptance

RULES: tuple[dict[str, Any], ...] = (
    {"rule": "coupled", "draft": "one-hot", "temperature": 1.0},
    {"rule": "token", "draft": "one-hot", "temperature": 0.8, "top_k": 50, "top_p": 0.9},
    {"rule": "token", "draft": "logits", "temperature": 1.0},
    {"rule": "recursive", "draft": "logits", "temperature": 1.0},
    {"rule": "block", "draft": "logits", "temperature": 1.0},
)


def ours(x: Window, rule: str) -> Acceptance:
    return rejection_sample(*x[:5], draft_logits=x.draft_logits, rule=rule)


def by_reference(x: Window, rule: str) -> Acceptance:
    return reference.rejection_sample(*x[:5], x.draft_logits, None, rule)


def rivals(shape: dict[str, Any]) -> dict[str, Function]:
    if shape["draft"] == "one-hot":
        return {"torch_batched": partial(torch_sampling.chains, pick=torch_sampling.picker(shape))}
    if shape["rule"] == "block":
        found: dict[str, Function] = {"torch_batched": torch_sampling.blocks}
    else:
        found = {"torch_batched": torch_sampling.trees}
    if shape["rule"] != "recursive" and transformers_version() is not None:
        found["hf_speculative_sampling"] = torch_sampling.hf_speculative_sampling
    return found


def plausible(got: Emitted, expected: Acceptance, x: Window) -> None:
    """A rival draws with noise of its own: a path of drafted tokens, then a token of the kept set,
    and about as many accepted as the reference accepts."""
    children = windows.children_of(x.parents[0].tolist())
    slots = []
    for tokens, accepted, drafted in zip(
        got.tokens.tolist(), got.num_accepted.tolist(), x.tokens.tolist(), strict=True
    ):
        slot = 0
        for token in tokens[:accepted]:
            kids = [kid for kid in children[slot] if drafted[kid] == token]
            assert kids, "accepted a token that was not drafted there"
            slot = kids[0]
        slots.append(slot)
        assert all(token == -1 for token in tokens[accepted + 1 :]), "goes on behind the last token"
    rows = torch.arange(len(slots))
    last = got.tokens[rows, got.num_accepted]
    kept = prepare(x.logits[rows, torch.tensor(slots)], *x.sampling[:4]).kept
    assert bool(kept[rows, last].all()), "drew a token outside the kept set"
    counts = [v.double() for v in (got.num_accepted, expected.num_accepted)]
    spread = max(1.0, *(float(v.std(unbiased=False)) for v in counts))
    difference = abs(float(counts[0].mean() - counts[1].mean()))
    assert difference <= 8 * spread * (2 / len(slots)) ** 0.5, "accepts another share"


def coupled_operations(case: dict[str, Any]) -> int:
    return windows.draw_operations(case["rows_visited"], case["V"])


def shapes(quick: bool) -> Iterable[dict[str, Any]]:
    for batch, drafted, vocab in (1, 8, 49152), (2 if quick else 32, 5, 151936):
        for rule in RULES:
            yield {"B": batch, "T": drafted + 1, "V": vocab, "dtype": "bf16", **rule}


def cases(options: Options) -> Iterable[Case]:
    for shape in shapes(options.quick):
        yield Case(
            shape=shape,
            make=partial(windows.make, shape=shape),
            run=partial(ours, rule=shape["rule"]),
            reference=partial(by_reference, rule=shape["rule"]),
            rivals=rivals(shape),
            bytes=windows.logits_bytes(shape),
            check_rival=plausible,
            facts=partial(windows.visits, shape=shape),
            reads=lambda x: [x.logits],
            operations=coupled_operations if shape["rule"] == "coupled" else None,
            vary=True,
        )
