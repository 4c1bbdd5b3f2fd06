"""Hypothesis against the kernels: whatever comes in, a step emits ids of the vocabulary.

200 examples by default; `pytest -k fuzz --hypothesis-profile=nightly` runs 5,000.
"""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from helpers import backends
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import pick, random_edits

from specdec_kernels.ops.rejection_sample import RULES, rejection_sample
from specdec_kernels.ops.sample import sample
from specdec_kernels.ops.verify_greedy import verify_greedy
from specdec_kernels.tree import STATUS_EMPTY, STATUS_NAN, SamplingParams

# An interpreter would take hours.
BACKENDS = [b for b in backends("rejection_sample") if b != "triton"]

NATIVE = [b for b in BACKENDS if b != "reference"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = st.sampled_from((1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 111, 1000))
LARGE = st.sampled_from((4097, 32000, 50257, 151936, 151937))
VOCABS = st.one_of(SMALL, SMALL, SMALL, LARGE)
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 1e5, -1e5, 3e38, -3e38)
BATCH = 3


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of tiny calls: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case(NamedTuple):
    logits: torch.Tensor
    window: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sampling: SamplingParams
    draft_logits: torch.Tensor | None


def choose(g, values, dtype):
    return torch.tensor([values[pick(g, 0, len(values))] for _ in range(BATCH)], dtype=dtype)


def spoil(g, logits, values):
    """Writes special values to the first, the last and random tokens of some rows, or over rows."""
    logits = logits.clone()
    for value in values:
        row = logits[pick(g, 0, logits.shape[0]), pick(g, 0, logits.shape[1])]
        where = pick(g, 0, 4)
        if where == 0:
            row[0] = value
        elif where == 1:
            row[-1] = value
        elif where == 2:
            row[torch.rand(row.shape, generator=g) < 0.3] = value
        else:
            row.fill_(value)
    return logits


def make_case(seed, vocab, width, scale, values, rule, dtype, drafted, edits):
    g = torch.Generator().manual_seed(seed)
    width = width if vocab < 4096 else min(width, 2)
    chain = rule == "block" or (rule == "token" and drafted)
    links = [[-1] + [s - 1 if chain else pick(g, 0, s) for s in range(1, width)]] * BATCH
    parents = torch.tensor(links, dtype=torch.int32)
    num_nodes = torch.randint(0, width + 1, (BATCH,), generator=g, dtype=torch.int32)
    ids = torch.randint(-1, vocab + 1, (BATCH, width), generator=g)
    logits = spoil(g, torch.randn(BATCH, width, vocab, generator=g) * scale, values).to(dtype)
    likely = logits.nan_to_num(0.0).float().argmax(-1).gather(1, parents.clamp(min=0).long())
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.5, likely, ids)
    draft = None
    if drafted:
        size = max(1, vocab + pick(g, -2, 3))
        draft = spoil(g, torch.randn(BATCH, width, size, generator=g), values[:1])
    sampling = SamplingParams(
        choose(g, (0.0, 1e-40, 1e-20, 1e-4, 1.0, 1.0, 100.0), torch.float32),
        choose(g, (0, 0, 1, vocab, vocab + 1), torch.int32),
        choose(g, (0.0, 1e-6, 0.7, 1.0, 1.0), torch.float32),
        choose(g, (0.0, 0.0, 0.1, 1.0), torch.float32),
        *torch.randint(-(2**63), 2**63 - 1, (3, BATCH), generator=g),
    )
    if edits:
        sampling = random_edits(g, sampling, vocab, width)
    return Case(logits, (ids, parents, num_nodes), sampling, draft)


def check(case, result, rule):
    """What holds of every Acceptance. `block` also looks at nodes that it does not keep."""
    vocab = case.logits.shape[-1]
    path, count, tokens, status = result
    emitted = torch.where(case.window[2] > 0, count + 1, 0)
    used = torch.arange(tokens.shape[1]) < emitted[:, None]
    assert ((tokens >= 0) & (tokens < vocab))[used].all()
    assert (tokens[~used] == -1).all() and (path[~used] == -1).all()
    assert ((path >= 0) & (path < case.window[2][:, None]))[used].all()
    assert (status & ~(STATUS_NAN | STATUS_EMPTY) == 0).all()
    assert (status[case.window[2] == 0] == 0).all()
    for b in range(BATCH):
        slots = path[b, : int(emitted[b])].tolist()
        for parent, slot in itertools.pairwise(slots):
            assert int(case.window[1][b, slot]) == parent
        drafted = case.window[0][b, slots[1:]]
        assert torch.equal(drafted, tokens[b, : len(drafted)])
        if case.draft_logits is None and not case.sampling.edits:
            has_nan = bool(case.logits[b, slots].isnan().any())
            assert bool(status[b] & STATUS_NAN) == has_nan or (rule == "block" and not has_nan)


@given(
    seed=st.integers(0, 2**32),
    vocab=VOCABS,
    width=st.sampled_from([1, 2, 3, 6]),
    scale=st.sampled_from([0.0, 1e-40, 1.0, 8.0, 1e5]),
    values=st.lists(st.sampled_from(SPECIAL), max_size=4),
    rule=st.sampled_from(RULES),
    dtype=st.sampled_from(DTYPES),
    drafted=st.booleans(),
    edits=st.booleans(),
)
def test_fuzz_rejection_sample(seed, vocab, width, scale, values, rule, dtype, drafted, edits):
    case = make_case(seed, vocab, width, scale, values, rule, dtype, drafted, edits)
    expected, *others = [
        rejection_sample(
            case.logits, *case.window, case.sampling, draft_logits=case.draft_logits, rule=rule,
            backend=backend,
        )
        for backend in BACKENDS
    ]  # fmt: skip
    check(case, expected, rule)
    for other in others:
        for got, wanted in zip(other, expected, strict=True):
            assert torch.equal(got, wanted)


@given(
    seed=st.integers(0, 2**32),
    vocab=VOCABS,
    scale=st.sampled_from([0.0, 1e-40, 1.0, 8.0, 1e5]),
    values=st.lists(st.sampled_from(SPECIAL), max_size=4),
    dtype=st.sampled_from(DTYPES),
    edits=st.booleans(),
)
def test_fuzz_sample_and_verify_greedy(seed, vocab, scale, values, dtype, edits):
    case = make_case(seed, vocab, 1, scale, values, "coupled", dtype, False, False)
    sampling = case.sampling
    if edits:
        g = torch.Generator().manual_seed(seed)
        sampling = random_edits(g, sampling, vocab, None)
    expected = sample(case.logits[:, 0], sampling, backend="reference")
    assert ((expected >= 0) & (expected < vocab)).all()
    greedy = verify_greedy(case.logits, *case.window, backend="reference")
    check(case, greedy, "coupled")
    for backend in NATIVE:
        assert torch.equal(sample(case.logits[:, 0], sampling, backend=backend), expected)
        for got, wanted in zip(
            verify_greedy(case.logits, *case.window, backend=backend), greedy, strict=True
        ):
            assert torch.equal(got, wanted)


def available_memory() -> int:
    with open("/proc/meminfo") as lines:
        fields = dict(line.split(":") for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def enough_memory(needed: int) -> bool:
    try:
        return available_memory() > needed
    except OSError:
        return False


@pytest.mark.skipif(not enough_memory(10 * 2**30), reason="needs 10 GB of free memory")
@pytest.mark.parametrize("backend", NATIVE)
def test_more_than_2_to_the_31_elements(backend):
    """A09: the last row, behind 4.3 GB of others, is one-hot; in fp16 the zeros before it too."""
    rows, vocab = 2**15, 2**16 + 8
    logits = torch.zeros(rows, vocab, dtype=torch.float16)
    assert logits.numel() > 2**31
    logits[-1, -3] = 100.0
    sampling = SamplingParams.make(rows, temperature=0.0)
    sampling.temperature[-2:] = 1.0
    tokens = sample(logits, sampling, backend=backend)
    assert int(tokens[-1]) == vocab - 3 and 0 < int(tokens[-2]) < vocab
    assert not tokens[:-2].any()
    window = logits.view(rows // 2, 2, vocab)
    ids = torch.tensor([[0, vocab - 3]]).expand(rows // 2, -1)
    parents = torch.tensor([[-1, 0]], dtype=torch.int32).expand(rows // 2, -1)
    num_nodes = torch.zeros(rows // 2, dtype=torch.int32)
    num_nodes[-1] = 2
    window[-1, 0] = window[-1, 1]
    sampling = SamplingParams.make(rows // 2)
    for rule in ("coupled", "recursive", "block", "typical"):
        result = rejection_sample(
            window, ids, parents, num_nodes, sampling, rule=rule, backend=backend,
            draft_logits=window if rule in ("recursive", "block") else None,
        )  # fmt: skip
        assert result.output_token_ids[-1].tolist() == [vocab - 3] * 2
    assert verify_greedy(window, ids, parents, num_nodes).num_accepted[-1] == 1
