"""Same seed, same tokens: 2,000 rows of every kind on every backend.

Under Triton's interpreter, which takes 30 ms for a row, 2,000 are drawn without edits and under
`coupled`, and fewer otherwise.
"""

import pytest
import torch
from helpers import backends
from sampling_cases import (
    likely_children,
    random_edits,
    random_sampling,
    random_window,
    rows_for,
)

from specdec_kernels.ops.rejection_sample import rejection_sample
from specdec_kernels.ops.sample import sample
from specdec_kernels.tree import SamplingParams

ROWS, VOCAB, WIDTH = 2000, 61, 4


def first_rows(sampling, count):
    return SamplingParams(*(None if field is None else field[:count] for field in sampling))


@pytest.mark.parametrize("backend", [b for b in backends("sample") if b != "reference"])
def test_sample(backend):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=g) * 3
    plain = SamplingParams.make(ROWS, temperature=0.8, seed=range(ROWS), position=range(ROWS))
    edited = random_edits(g, random_sampling(g, ROWS, VOCAB), VOCAB, None)
    few = first_rows(edited, rows_for(backend, ROWS, 100 if backend == "triton" else ROWS))
    for sampling in (plain, few):
        rows = logits[: len(sampling.seed)]
        expected = sample(rows, sampling, backend="reference")
        assert torch.equal(sample(rows, sampling, backend=backend), expected)


@pytest.mark.parametrize("backend", [b for b in backends("rejection_sample") if b != "reference"])
@pytest.mark.parametrize("rule", ["coupled", "recursive", "block", "typical"])
def test_rejection_sample(backend, rule):
    g = torch.Generator().manual_seed(1)
    everything = backend != "triton" or rule == "coupled"
    batch = (ROWS if everything else rows_for(backend, ROWS, 120)) // WIDTH
    logits = torch.randn(batch, WIDTH, VOCAB, generator=g).bfloat16() * 3
    ids, parents, num_nodes = random_window(g, batch, WIDTH, VOCAB, chain=rule == "block")
    ids = likely_children(g, ids, parents, logits.float().argmax(-1))
    sampling = random_sampling(g, batch, VOCAB)
    if everything and backend == "triton":
        sampling = SamplingParams.make(batch, temperature=0.8, seed=range(batch))
    draft = logits + torch.randn(logits.shape, generator=g)
    args = (logits, ids, parents, num_nodes, sampling)
    options = {"rule": rule, "draft_logits": draft if rule in ("recursive", "block") else None}
    expected = rejection_sample(*args, **options, backend="reference")
    for value, wanted in zip(
        rejection_sample(*args, **options, backend=backend), expected, strict=True
    ):
        assert torch.equal(value, wanted)
