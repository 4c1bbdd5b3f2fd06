import importlib

import pytest
import torch
from helpers import backends
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_kernels.ops.ngram_lookup import ngram_lookup

BACKENDS = backends("ngram_lookup")


def oracle(text, min_n, max_n, k, latest):
    """All different drafts, best first, by the docstring's sentences, one position at a time."""
    last = len(text) - 1
    found = []
    for e in range(last):
        length = max(
            (n for n in range(1, min(max_n, e + 1) + 1) if text[e + 1 - n : e + 1] == text[-n:]),
            default=0,
        )
        if length >= min_n:
            draft = list(text[e + 1 :])
            while len(draft) < k:
                draft.append(draft[-(last - e)])
            found.append((-length, -e if latest else e, tuple(draft[:k])))
    drafts = []
    for _, _, draft in sorted(found):
        if draft not in drafts:
            drafts.append(draft)
    return drafts


def batch_of(texts, room=0):
    """Rows padded with tokens that would match if they were read."""
    width = max(map(len, texts)) + room
    rows = [list(t) + [t[-1] if t else 1] * (width - len(t)) for t in texts]
    tokens = torch.tensor(rows, dtype=torch.int32).view(len(texts), width)
    return tokens, torch.tensor([len(t) for t in texts], dtype=torch.int32)


def check(texts, backend, min_n, max_n, k, m, latest, room=0):
    tokens, lens = batch_of(texts, room)
    options = dict(min_n=min_n, max_n=max_n, k=k, num_matches=m, latest=latest)
    ids, num = ngram_lookup(tokens, lens, **options, backend=backend)
    assert ids.shape == (len(texts), m, k) and ids.dtype == torch.int64
    assert num.shape == (len(texts), m) and num.dtype == torch.int32
    for b, text in enumerate(texts):
        drafts = oracle(text, min_n, max_n, k, latest)[:m]
        missing = m - len(drafts)
        assert num[b].tolist() == [k] * len(drafts) + [0] * missing
        assert ids[b].tolist() == [list(d) for d in drafts] + [[-1] * k] * missing


texts_strategy = st.lists(
    st.one_of(
        st.lists(st.integers(0, 2), max_size=90),
        st.builds(lambda p, r: (p * r)[:300], st.lists(st.integers(0, 3), max_size=7), st.just(60)),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=120, deadline=None)
@given(
    texts=texts_strategy,
    min_n=st.integers(1, 4),
    more=st.integers(0, 6),
    k=st.integers(1, 12),
    m=st.integers(1, 6),
    latest=st.booleans(),
    room=st.integers(0, 3),
)
def test_against_oracle(backend, texts, min_n, more, k, m, latest, room):
    check(texts, backend, min_n, min_n + more, k, m, latest, room)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize("length", [2, 31, 32, 33, 63, 64, 65, 66, 129, 1000])
def test_lengths_around_the_vector_blocks(backend, latest, length):
    g = torch.Generator().manual_seed(length)
    rare = torch.randint(0, 40, (length,), generator=g).tolist()
    often = torch.randint(0, 2, (length,), generator=g).tolist()
    alone = [7] + [1] * (length - 2) + [7]
    check([rare, often, alone], backend, 1, 5, 4, 3, latest)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("latest", [True, False])
@pytest.mark.parametrize("length", [32_768, 32_832, 32_833, 80_000])
def test_matches_far_apart_in_long_texts(backend, latest, length):
    if backend == "triton":
        length //= 8  # still several of its chunks
    tokens = torch.arange(length, dtype=torch.int32).repeat(2, 1)
    options = dict(min_n=1, max_n=4, k=3, num_matches=4, latest=latest)
    ends = (3, 64, 2047, 2048, 16_383, 32_703, 32_767, length // 2, length - 70, length - 9)
    for end in [end for end in ends if end < length - 4]:
        tokens[0, end - 3 : end + 1] = tokens[0, -4:]
        lens = torch.tensor([length, length - 1], dtype=torch.int32)
        expected = ngram_lookup(tokens, lens, **options, backend="reference")
        result = ngram_lookup(tokens, lens, **options, backend=backend)
        assert expected[1][0].any()
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.skipif("triton" not in BACKENDS, reason="a size of the Triton kernels")
@pytest.mark.parametrize("backend", ["triton"])
@pytest.mark.parametrize("latest", [True, False])
def test_matches_of_many_chunks(backend, latest, monkeypatch):
    """Merged more than once."""
    module = importlib.import_module("specdec_kernels.ops.ngram_lookup.triton")
    monkeypatch.setattr(module, "CHUNK", 16)
    g = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, n, (300,), generator=g).tolist() for n in (2, 5, 60)]
    check([*texts, texts[0][:50], [3] * 300], backend, 1, 5, 4, 5, latest)


@pytest.mark.parametrize("backend", BACKENDS)
def test_which_of_several_matches(backend):
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3, 9, 5, 1, 2, 3]
    tokens, lens = batch_of([text])

    def drafts(**options):
        options = {"min_n": 2, "max_n": 3, "k": 2, "backend": backend} | options
        return ngram_lookup(tokens, lens, **options)[0].tolist()[0]

    assert drafts() == [[9, 5]]
    assert drafts(latest=False) == [[9, 1]]
    assert drafts(num_matches=4) == [[9, 5], [8, 1], [9, 1], [-1, -1]]
    assert drafts(num_matches=3, latest=False) == [[9, 1], [8, 1], [9, 5]]
    assert drafts(num_matches=3, k=1) == [[9], [8], [-1]]  # both nines are one draft
    assert drafts(max_n=9, min_n=4) == [[-1, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_match_at_the_end_continues_periodically(backend):
    tokens, lens = batch_of([[4, 5, 6, 5, 6], [7, 7], [3, 4]])
    ids, num = ngram_lookup(tokens, lens, min_n=1, max_n=4, k=5, backend=backend)
    assert ids[:, 0].tolist() == [[5, 6, 5, 6, 5], [7] * 5, [-1] * 5]
    assert num.tolist() == [[5], [5], [0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_independent(backend):
    yes, no = [1, 2, 3, 1, 2], [1, 2, 3, 4, 5]
    options = dict(min_n=2, max_n=3, k=3, backend=backend)
    for hit in (1, 2):
        texts = [no, no, no]
        texts[hit] = yes
        ids, num = ngram_lookup(*batch_of(texts), **options)
        assert num.flatten().tolist() == [3 if b == hit else 0 for b in range(3)]
        assert ids[hit, 0].tolist() == [3, 1, 2]
        assert all((ids[b] == -1).all() for b in range(3) if b != hit)


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_inputs(backend):
    wide = torch.tensor([[1, 2, 1, 2, 9, 9]] * 2, dtype=torch.int32)
    options = dict(min_n=1, max_n=3, k=3, backend=backend)
    strided = wide.repeat_interleave(2, dim=1)[:, ::2]
    for lens in ([0, 1], [-3, 4], [4, 99]):
        lens = torch.tensor(lens, dtype=torch.int32)
        expected = ngram_lookup(wide, lens.clamp(0, 6), **options)
        for tokens in (wide, strided):
            ids, num = ngram_lookup(tokens, lens, **options)
            assert torch.equal(ids, expected[0]) and torch.equal(num, expected[1])
        assert ((ids == -1).all(-1).flatten() == (lens.clamp(0, 6) < 2)).all()
    for shape in ((0, 5), (2, 0)):
        empty = torch.zeros(shape, dtype=torch.int32)
        ids, num = ngram_lookup(empty, torch.zeros(shape[0], dtype=torch.int32), **options)
        assert ids.shape == (shape[0], 1, 3) and not num.any()


def test_many_rows_on_threads():
    if "cpu" not in BACKENDS:
        pytest.skip("needs the compiled module")
    tokens = torch.randint(0, 9, (40, 2000), dtype=torch.int32)
    lens = torch.randint(0, 2001, (40,), dtype=torch.int32)
    options = dict(min_n=1, max_n=6, k=7, num_matches=5)
    expected = ngram_lookup(tokens, lens, **options, backend="reference")
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            result = ngram_lookup(tokens, lens, **options, backend="cpu")
            assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_errors_name_the_argument():
    tokens, lens = batch_of([[1, 2, 1]])
    good = dict(min_n=1, max_n=2, k=1)
    with pytest.raises(TypeError, match="ngram_lookup: expected tokens as int32, got int64"):
        ngram_lookup(tokens.long(), lens, **good)
    with pytest.raises(ValueError, match=r"ngram_lookup: expected lens \[B\].*got \[2\]"):
        ngram_lookup(tokens, lens.repeat(2), **good)
    with pytest.raises(ValueError, match="expected 1 <= min_n <= max_n, got min_n 3, max_n 2"):
        ngram_lookup(tokens, lens, **good | {"min_n": 3})
    with pytest.raises(ValueError, match="expected k of at least 1, got 0"):
        ngram_lookup(tokens, lens, **good | {"k": 0})
    with pytest.raises(ValueError, match="expected num_matches from 1 to 64, got 65"):
        ngram_lookup(tokens, lens, **good, num_matches=65)


def test_opcheck_and_compile():
    tokens, lens = batch_of([[1, 2, 3, 1, 2], [5, 5, 5], []])
    op = torch.ops.specdec_kernels.ngram_lookup.default
    torch.library.opcheck(op, (tokens, lens, 1, 3, 4, 2, True))
    options = dict(min_n=1, max_n=3, k=4, num_matches=2)
    compiled = torch.compile(ngram_lookup, fullgraph=True)(tokens, lens, **options)
    eager = ngram_lookup(tokens, lens, **options)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))


def test_dispatch_modes_see_the_op():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    seen = []
    tokens, lens = batch_of([[1, 2, 3, 1, 2]])
    options = dict(min_n=1, max_n=3, k=4)
    expected = ngram_lookup(tokens, lens, **options)
    with Watch():
        watched = ngram_lookup(tokens, lens, **options)
    assert torch.ops.specdec_kernels.ngram_lookup.default in seen
    with FakeTensorMode() as mode:
        fake = ngram_lookup(*map(mode.from_tensor, (tokens, lens)), **options)
    for a, b, c in zip(watched, expected, fake, strict=True):
        assert torch.equal(a, b) and b.shape == c.shape and b.dtype == c.dtype
    with pytest.raises(RuntimeError, match="no backend 'abacus'"):
        ngram_lookup(tokens, lens, **options, backend="abacus")
