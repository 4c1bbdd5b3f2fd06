"""The index against the specification of ngram_lookup, token by token."""

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_kernels import native
from specdec_kernels.dispatch import use_backend
from specdec_kernels.drafting.ngram import NgramDrafter
from specdec_kernels.drafting.search import IndexSearch, OpSearch, make_search
from specdec_kernels.ops import ngram_lookup

pytestmark = pytest.mark.skipif(native.cpu is None, reason=str(native.cpu_error))


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def expected(text, *, min_n, max_n, k, num_matches, backend="reference"):
    """The drafts of one text, and the length of its longest match, by trying all of them."""
    options = dict(k=k, num_matches=num_matches, backend=backend)
    tokens, lens = ints([text]).view(1, -1), ints([len(text)])
    ids, num = ngram_lookup(tokens, lens, min_n=min_n, max_n=max_n, **options)
    drafts = [d for d, n in zip(ids[0].tolist(), num[0].tolist(), strict=True) if n]
    length = max(
        (
            n
            for n in range(min_n, min(max_n, len(text) - 1) + 1)
            if any(text[e - n : e] == text[-n:] for e in range(n, len(text)))
        ),
        default=0,
    )
    return drafts, length


def make(batch=1, min_n=1, max_n=4, k=4, num_matches=2):
    return native.cpu.NgramIndex(batch, min_n=min_n, max_n=max_n, k=k, num_matches=num_matches)


def answers(index):
    return list(zip(*index.lookup(), strict=True))


pieces = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.builds(lambda unit, n: unit * n, st.lists(st.integers(0, 2), max_size=4), st.integers(1, 9)),
    st.integers(1, 40),  # copies that many of the last tokens
)


@settings(max_examples=250, deadline=None)
@given(
    appends=st.lists(pieces, min_size=1, max_size=12),
    min_n=st.integers(1, 5),
    more=st.integers(0, 11),
    k=st.integers(1, 12),
    m=st.integers(1, 6),
)
def test_equals_ngram_lookup_after_every_append(appends, min_n, more, k, m):
    options = dict(min_n=min_n, max_n=min_n + more, k=k, num_matches=m)
    index, text = make(**options), []
    for piece in appends:
        new = text[-piece:] if isinstance(piece, int) else piece
        text = text + new
        index.extend(0, ints(new))
        assert answers(index) == [expected(text, **options)]


@pytest.mark.parametrize("m", [1, 3, 64])
@pytest.mark.parametrize("min_n, max_n", [(1, 1), (1, 16), (3, 3), (2, 64)])
@pytest.mark.parametrize("k", [1, 5, 48])
@pytest.mark.parametrize("vocab, period", [(1, 1), (2, 2), (2, 0), (5, 0), (9, 37)])
def test_token_by_token(m, min_n, max_n, k, vocab, period):
    rng = random.Random(str((m, min_n, k, vocab, period)))
    text = [rng.randrange(vocab) for _ in range(period or 160)]
    text = (text * 160)[:160]
    if period == 2:
        text = [0, 1] * 80
    options = dict(min_n=min_n, max_n=max_n, k=k, num_matches=m)
    index = make(**options)
    for n, token in enumerate(text):
        index.extend(0, ints([token]))
        if n % 7 == 0 or n > 150:
            assert answers(index) == [expected(text[: n + 1], **options, backend="cpu")]


def test_2000_steps_with_rows_that_finish_and_start_again():
    rng, batch = random.Random(7), 5
    options = dict(min_n=1, max_n=16, k=9, num_matches=3)
    search = IndexSearch(lengths=(2, 4, 8), **options)
    texts = [[rng.randrange(9)] for _ in range(batch)]
    vocab = [2, 4, 50, 1000, 1000]
    for step in range(2000):
        for b, text in enumerate(texts):
            if rng.random() < 0.005:
                texts[b] = [rng.randrange(vocab[b]) for _ in range(rng.randrange(300))]
            elif rng.random() < 0.3 and len(text) > 20:
                start = rng.randrange(len(text) - 10)
                text += text[start : start + rng.randrange(10)]
            elif rng.random() < 0.9:  # otherwise nothing new: a finished row
                text += [rng.randrange(vocab[b]) for _ in range(rng.randrange(4))]
        width = max(map(len, texts)) + step % 3
        tokens = ints([t + [t[-1] if t else 0] * (width - len(t)) for t in texts])
        lens = ints([len(t) for t in texts])
        drafts, lengths = search.find(tokens, lens)
        ids, num = ngram_lookup(tokens, lens, **options)
        for b in range(batch):
            assert drafts[b] == ids[b, : int((num[b] > 0).sum())].tolist()
        b = step // 5 % batch
        assert step % 5 or lengths[b] == expected(texts[b], **options, backend="cpu")[1]


def test_rows_are_independent_and_can_be_reset():
    index = make(batch=3)
    index.extend(1, ints([1, 2, 3, 1, 2]))
    index.extend(2, ints([5, 5]))
    index.extend(0, ints([]))
    assert index.lookup() == ([[], [[3, 1, 2, 3]], [[5] * 4]], [0, 2, 1])
    index.reset(1)
    assert index.lookup()[1] == [0, 0, 1]
    index.extend(1, ints([4, 5, 4]))
    assert index.lookup()[0][1] == [[5, 4, 5, 4]]
    assert [index.size(b) for b in range(3)] == [0, 3, 2]
    assert make(batch=0).lookup() == ([], [])


def test_follow_appends_or_starts_afresh():
    index = make(batch=2)
    tokens = ints([[1, 2, 3, 1, 2, 9], [4, 4, 7, 9, 9, 9]])
    index.follow(tokens[:, :3], ints([3, 3]), 1)
    index.follow(tokens, ints([5, 2]), 2)
    assert index.lookup() == ([[[3, 1, 2, 3]], [[4] * 4]], [2, 1])
    index.follow(tokens.flip(0), ints([9, -3]), 1)  # other tokens; lens beyond S and below 0
    assert [index.size(0), index.size(1)] == [6, 0]
    assert index.lookup() == ([[[9] * 4], []], [2, 0])


def test_long_prompts_on_threads():
    tokens = torch.randint(0, 30, (6, 3000), dtype=torch.int32)
    lens = ints([3000, 0, 1, 2999, 17, 2048])
    options = dict(min_n=1, max_n=6, k=7, num_matches=5)
    found = []
    for threads in (1, 3):
        index = make(batch=6, **options)
        index.follow(tokens, lens, threads)
        found.append(index.lookup())
    assert found[0] == found[1]
    for b, n in enumerate(lens.tolist()):
        assert found[0][0][b] == expected(tokens[b, :n].tolist(), **options, backend="cpu")[0]


def test_threads_take_turns():
    index = make(batch=2, max_n=8)

    def work(row):
        for _ in range(200):
            index.extend(row, ints([1, 2, 3]))
            index.lookup()

    threads = [threading.Thread(target=work, args=(row,)) for row in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [index.size(0), index.size(1)] == [1200, 1200]


@pytest.mark.parametrize("unit, limit", [(1, 32), (2, 32), (60_000, 128), (30_000, 400)])
def test_memory_is_bounded_per_token(unit, limit):
    """The last text is the worst: every n-gram of a document occurs once more."""
    g = torch.Generator().manual_seed(1)
    text = torch.randint(0, 50_000, (unit,), generator=g).repeat(60_000 // unit)
    index = make(max_n=16, k=48, num_matches=3)
    index.extend(0, text.int())
    assert index.bytes < limit * text.numel()


def test_errors():
    with pytest.raises(ValueError, match="expected 1 <= min_n <= max_n <= 64"):
        make(min_n=3, max_n=2)
    with pytest.raises(ValueError, match="expected 1 <= min_n <= max_n <= 64"):
        make(max_n=65)
    with pytest.raises(ValueError, match="expected k of at least 1"):
        make(k=0)
    with pytest.raises(ValueError, match="expected num_matches from 1 to 64"):
        make(num_matches=65)
    with pytest.raises(ValueError, match="expected batch of at least 0"):
        make(batch=-1)
    index = make(batch=2)
    with pytest.raises(IndexError):
        index.extend(2, ints([1]))
    with pytest.raises(IndexError):
        index.reset(-1)
    with pytest.raises(TypeError, match="tokens: expected int32, got int64"):
        index.extend(0, torch.tensor([1]))
    with pytest.raises(ValueError, match=r"lens: expected shape \[2\], got \[1\]"):
        index.follow(ints([[1], [2]]), ints([1]), 1)
    with pytest.raises(ValueError, match="tokens: expected shape"):
        index.follow(ints([[1]]), ints([1]), 1)


def test_which_search_is_used():
    options = dict(min_n=1, max_n=4, k=3, num_matches=2, lengths=(2, 4))
    assert isinstance(make_search("cpu", **options), IndexSearch)
    assert isinstance(make_search("cpu", **options | {"max_n": 65}), OpSearch)
    with use_backend("reference"):
        assert isinstance(make_search("cpu", **options), OpSearch)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=3),
    min_n=st.integers(1, 5),
    more=st.integers(0, 12),
)
def test_both_searches_give_the_drafter_the_same(texts, min_n, more):
    options = dict(min_n=min_n, max_n=min_n + more, num_matches=3, max_draft=6)
    width = max(map(len, texts))
    tokens, lens = ints([t + [0] * (width - len(t)) for t in texts]), ints(list(map(len, texts)))
    seen = []
    for backend in ("cpu", "reference"):
        with use_backend(backend):
            drafter = NgramDrafter(**options, eos_token_ids=frozenset([2]))
            drafter.begin(tokens[:, :1], lens.clamp(max=1), None)
            classes = drafter.confidence(tokens, lens)
            tree = drafter.propose(tokens, lens, None, [8] * len(texts), [5] * len(texts))
            seen.append((classes, tree.draft_token_ids.tolist(), tree.parents.tolist()))
    assert seen[0] == seen[1]
