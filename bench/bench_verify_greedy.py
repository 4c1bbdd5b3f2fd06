"""verify_greedy against the largest logit of every visited row in PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from bench import torch_sampling, windows
from bench.harness import Case, Options
from bench.torch_sampling import Emitted
from bench.windows import Window
from specdec_kernels.ops import verify_greedy
from specdec_kernels.ops.verify_greedy import reference
from specdec_kernels.tree import Acceptance


def ours(x: Window) -> Acceptance:
    return verify_greedy(x.logits, x.tokens, x.parents, x.num_nodes)


def by_reference(x: Window) -> Acceptance:
    return reference.verify_greedy(x.logits, x.tokens, x.parents, x.num_nodes)


def torch_batched(x: Window) -> Emitted:
    return torch_sampling.chains(x, torch_sampling.largest)


def same_tokens(got: Emitted, expected: Acceptance, x: Window) -> None:
    assert got.tokens.equal(expected.output_token_ids), "other tokens"
    assert got.num_accepted.equal(expected.num_accepted.long()), "accepted other counts"


def shapes(quick: bool) -> Iterable[dict[str, Any]]:
    sizes = ((8, 5, 151936), (1, 8, 49152)) if quick else ((32, 5, 151936), (1, 8, 49152))
    for batch, drafted, vocab in sizes:
        for dtype in ("bf16",) if quick else ("bf16", "fp32"):
            yield {"B": batch, "T": drafted + 1, "V": vocab, "dtype": dtype}


def cases(options: Options) -> Iterable[Case]:
    for shape in shapes(options.quick):
        yield Case(
            shape=shape,
            make=partial(windows.make, shape=shape),
            run=ours,
            reference=by_reference,
            rivals={"torch_batched": torch_batched},
            bytes=windows.logits_bytes(shape),
            check_rival=same_tokens,
            facts=partial(windows.visits, shape=shape),
            reads=lambda x: [x.logits],
            vary=True,
        )
