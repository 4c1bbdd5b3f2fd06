"""The cache of outputs: who shares it, what leaves it, its file; and the drafter on top of it."""

import random
import struct
import threading
from itertools import accumulate
from operator import mul

import pytest
import torch

from specdec_kernels import native
from specdec_kernels.drafting.matches import chance
from specdec_kernels.drafting.suffix import WORTH_A_SLOT, SuffixDrafter, cut
from specdec_kernels.drafting.suffix_cache import SuffixCache, little_endian

pytestmark = pytest.mark.skipif(native.cpu is None, reason=str(native.cpu_error))
VOCAB = 1000


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def make(max_requests=100, max_tokens=10_000, max_depth=8, vocab_size=VOCAB):
    return SuffixCache(
        max_depth=max_depth,
        max_requests=max_requests,
        max_tokens=max_tokens,
        vocab_size=vocab_size,
    )


def drafter(cache=None, **options):
    settings = dict(max_depth=8, max_draft=8, max_spec_factor=4.0, min_token_prob=0.1, tree=True)
    return SuffixDrafter(cache=cache, **settings | options)


def ragged(texts):
    width = max(map(len, texts)) + 1
    return ints([t + [0] * (width - len(t)) for t in texts]), ints([len(t) for t in texts])


def generate(cache, prompt, output):
    """As a run of one row that emits `output`."""
    one = drafter(cache)
    one.begin(*ragged([prompt + output[:1]]), None)
    one.end(*ragged([prompt + output]))


def stored(cache):
    """The texts, as lists."""
    tokens, lengths = cache.native.texts()
    ids = struct.unpack(f"{len(tokens) // 4}i", tokens)
    texts = []
    for n in struct.unpack(f"{len(lengths) // 8}q", lengths):
        texts.append(list(ids[:n]))
        ids = ids[n:]
    return texts


def propose(one, texts, nodes=9, depth=8):
    """Classes, and per row the tokens and parents of the tree."""
    tokens, lens = ragged(texts)
    classes = one.confidence(tokens, lens)
    tree = one.propose(tokens, lens, None, [nodes] * len(texts), [depth] * len(texts))
    rows = []
    for b, n in enumerate(tree.num_nodes.tolist()):
        rows.append((tree.draft_token_ids[b, :n].tolist(), tree.parents[b, :n].tolist()))
    return classes, rows


def test_outputs_are_kept_and_prompts_are_not():
    cache = make()
    generate(cache, [1, 2, 3, 4, 5], [6, 7, 8, 9])
    assert stored(cache) == [[6, 7, 8, 9]]
    assert propose(drafter(cache), [[9, 6, 7]]) == ([2], [([7, 8, 9], [-1, 0, 1])])
    assert propose(drafter(cache), [[9, 3, 4]]) == ([0], [([4], [-1])])


def test_the_better_of_text_and_cache_wins():
    """Score first, the text's own when equal."""
    cache = make()
    followed = [*range(20, 30)]
    generate(cache, [1], [5, 6, 7, *followed])
    own = [5, 6, 7, 30, 5, 6, 7]
    assert propose(drafter(cache), [own])[1][0][0][:2] == [7, 30]
    split = [5, 6, 7, 31, 5, 6, 7, 32, 5, 6, 7, 33, 5, 6, 7]
    assert propose(drafter(cache), [split]) == ([2], [([7, *followed[:8]], [*range(-1, 8)])])


@pytest.mark.parametrize("factor", [1.0, 20.0])
def test_beyond_the_factor_goes_what_is_likely_enough(factor):
    """A token of a match drafts `factor` tokens, and more while a slot for them pays."""
    text = [1, 50, *range(2, 30), 50]
    tokens = propose(drafter(max_draft=40, max_spec_factor=factor), [text], nodes=41, depth=40)[1]
    drafted = tokens[0][0][1:]
    chances = [*accumulate(map(chance, range(1, 40)), mul)]
    paying = sum(c >= WORTH_A_SLOT for c in chances)
    assert 1 < paying < 20
    assert drafted == text[2 : 2 + max(paying, int(factor))]


def test_a_draft_begins_again_where_the_text_ends():
    """A text that turns in a circle is followed as far as the room goes."""
    text = [1, 2, 40, 41, 42, 40, 41]
    ((tokens, parents),) = propose(drafter(max_draft=12), [text], nodes=13, depth=12)[1]
    assert tokens == [41, *[42, 40, 41] * 4] and parents == [*range(-1, 12)]


def test_trees_tell_their_chances():
    """Shares of what followed times what a match of that length is worth."""
    text = [1, 2, 9, 4, 1, 2, 8, 4, 1, 2, 9, 5, 1, 2]
    one = drafter()
    tokens, lens = ragged([text])
    one.confidence(tokens, lens)
    tree = one.propose(tokens, lens, None, [3], [8])
    assert tree.draft_token_ids.tolist() == [[2, 9, 8]]
    expected = [1.0, chance(2) * 2 / 3, chance(2) / 3]
    assert tree.chances[0].tolist() == pytest.approx(expected)


def test_more_frequent_continuations_come_first():
    """C06: twice 9, once 8; the text's own end is no match for itself."""
    text = [1, 2, 9, 4, 1, 2, 8, 4, 1, 2, 9, 5, 1, 2]
    _, rows = propose(drafter(), [text], nodes=3)
    assert rows == [([2, 9, 8], [-1, 0, 0])]
    assert propose(drafter(tree=False), [text], nodes=2)[1] == [([2, 9], [-1, 0])]
    assert propose(drafter(), [[1, 2, 3, 4]]) == ([0], [([4], [-1])])


def test_drafts_go_to_their_rows():
    """C07: first only row 1 matches, then only row 2; finished rows get no slot."""
    one = drafter(make())
    texts = [[1, 2, 3], [4, 5, 4], [6, 7, 8]]
    classes, rows = propose(one, texts)
    assert [c > 0 for c in classes] == [False, True, False]
    assert [r[0][:2] for r in rows] == [[3], [4, 5], [8]]
    texts = [texts[0] + [9], texts[1] + [10], texts[2] + [6]]
    classes, rows = propose(one, texts)
    assert [c > 0 for c in classes] == [False, False, True]
    assert [r[0][:2] for r in rows] == [[9], [10], [6, 7]]
    tokens, lens = ragged(texts)
    one.confidence(tokens, lens)
    tree = one.propose(tokens, lens, None, [2, 0, 2], [9, 9, 9])
    assert tree.num_nodes.tolist() == [1, 0, 2]


def test_drafts_end_at_an_eos():
    """C03."""
    text = [1, 2, 3, 50, 7, 8, 9, 1, 2]
    tokens = propose(drafter(eos_token_ids=frozenset([50])), [text])[1][0][0]
    assert tokens == [2, 3, 50]
    assert 7 in propose(drafter(), [text])[1][0][0]


def test_a_cut_draft_is_a_tree_of_its_likeliest_nodes():
    draft = ([5, 6, 7, 8, 9], [-1, 0, -1, 1, 2], [1.0] * 5, 5.0, 3)
    assert cut(4, draft, 0, 9)[:2] == ([], [])
    assert cut(4, draft, 1, 9)[:2] == ([4], [-1])
    assert cut(4, draft, 4, 9)[:2] == ([4, 5, 6, 7], [-1, 0, 1, 0])
    assert cut(4, draft, 9, 1)[:2] == ([4, 5, 7], [-1, 0, 0])
    assert cut(4, draft, 9, 2)[:2] == ([4, 5, 6, 7, 9], [-1, 0, 1, 0, 3])
    assert cut(4, draft, 9, 0)[:2] == ([4], [-1])


def test_confidence_grows_with_the_match_and_shrinks_with_doubt():
    words = [11, 12, 13, 14, 15, 16, 17]
    classes = [
        propose(drafter(max_depth=16), [[*words, 20, 21, *words[-n:]]])[0][0] for n in (1, 2, 4, 7)
    ]
    assert classes == [1, 2, 3, 3]
    unsure = [t for i in range(4) for t in (11, 12, 30 + i)] + [11, 12]
    assert propose(drafter(), [unsure])[0] == [1]


def test_rows_that_change_start_afresh():
    cache = make()
    one = drafter(cache)
    one.begin(*ragged([[1, 2, 3, 4]]), None)
    assert propose(one, [[1, 2, 3, 4, 3]])[0] == [1]
    assert propose(one, [[1, 2, 3]])[0] == [0]  # shorter
    assert propose(one, [[1, 2, 9, 9]])[0] == [1]  # another last token
    one.end(*ragged([[1, 2, 9, 9]]))
    assert stored(cache) == [[4, 3], [3], [9]]
    assert propose(one, [[4, 3, 4], [4]])[0] == [1, 1]  # another batch


@pytest.mark.parametrize("max_requests, max_tokens", [(3, 1000), (100, 30), (1, 7), (5, 1)])
def test_the_oldest_leave(max_requests, max_tokens):
    cache, outputs = make(max_requests, max_tokens), []
    for i in range(40):
        output = [(i + j) % VOCAB for j in range(1 + 5 * i % 23)]
        generate(cache, [1], output)
        outputs.append(output[:max_tokens])
        kept = outputs[-max_requests:]
        while sum(map(len, kept)) > max_tokens:
            kept = kept[1:]
        assert stored(cache) == kept
        assert (len(cache), cache.num_tokens) == (len(kept), sum(map(len, kept)))


def test_what_left_is_not_drafted():
    cache = make(max_requests=2)  # a row that asks for a draft is one, too
    generate(cache, [1], [5, 6, 7, 8])
    assert propose(drafter(cache), [[5, 6]])[0] == [2]
    generate(cache, [1], [15, 16, 17, 18])
    assert propose(drafter(cache), [[5, 6]])[0] == [0]
    assert propose(drafter(cache), [[15, 16]])[0] == [0]


def test_memory_is_bounded_by_the_limit():
    """C11: 10 million tokens in texts that repeat each other; memory is used again."""
    cache = make(max_requests=10_000, max_tokens=100_000, max_depth=24, vocab_size=50_000)
    g = torch.Generator().manual_seed(1)
    shared = torch.randint(0, 50_000, (200_000,), generator=g, dtype=torch.int32)
    held = []
    for i in range(5000):
        start, size = i * 7919 % 190_000, 2000
        text = shared[start : start + size].clone()
        text[:: 3 + i % 50] = torch.randint(0, 50_000, (1,), generator=g, dtype=torch.int32)
        batch = native.cpu.SuffixBatch(1, max_depth=24, cache=cache.native)
        batch.follow(text[None, :1], ints([1]))
        batch.follow(text[None], ints([size]))
        batch.end()
        held.append(cache.nbytes)
        assert cache.num_tokens <= 100_000
    assert cache.num_tokens == 100_000 and max(held) < 80 * 100_000
    assert held[-1] < 1.1 * held[500]


def test_threads_share_a_cache():
    """Runs that come, draft, and end in random order, beside saves and clears (C10)."""
    cache, errors = make(max_requests=20, max_tokens=3000), []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(60):
                texts = [[rng.randrange(9) for _ in range(rng.randrange(2, 30))] for _ in range(3)]
                one = drafter(cache)
                one.begin(*ragged(texts), None)
                for _ in range(rng.randrange(12)):
                    texts = [t + [rng.randrange(9)] * rng.randrange(3) for t in texts]
                    propose(one, texts)
                if rng.random() < 0.8:
                    one.end(*ragged(texts))
                if rng.random() < 0.05:
                    cache.clear()
                stored(cache)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(cache) <= 20 and cache.num_tokens == sum(map(len, stored(cache))) <= 3000


def test_the_same_calls_give_the_same_drafts():
    found = []
    for _ in range(2):
        rng, cache, drafts = random.Random(3), make(max_requests=7), []
        for _ in range(30):
            text = [rng.randrange(6) for _ in range(40)]
            drafts.append(propose(drafter(cache), [text]))
            generate(cache, text, text[:20])
        found.append(drafts)
    assert found[0] == found[1]


def filled():
    cache = make()
    for output in ([5, 6, 7], [4], [999, 0, 5, 6], [8] * 20):
        generate(cache, [1, 2], output)
    return cache


def test_a_file_brings_everything_back(tmp_path):
    path = tmp_path / "outputs"
    cache, other = filled(), make()
    cache.save(path)
    cache.save(path)  # over an older one
    generate(other, [1], [3, 3, 3])
    other.load(path)
    assert stored(other) == stored(cache) == [[5, 6, 7], [4], [999, 0, 5, 6], [8] * 20]
    texts = [[5, 6], [999, 0], [8, 8]]
    assert propose(drafter(other), texts) == propose(drafter(cache), texts)
    small = make(max_requests=2, max_tokens=22)
    small.load(path)
    assert stored(small) == [[8] * 20]
    assert [p.name for p in tmp_path.iterdir()] == ["outputs"]
    make().save(path)
    other.load(str(path))
    assert stored(other) == []


def test_bytes_are_swapped_on_machines_of_the_other_order(monkeypatch):
    monkeypatch.setattr("specdec_kernels.drafting.suffix_cache.sys.byteorder", "big")
    assert little_endian("i", struct.pack("<2i", 1, -2)) == struct.pack(">2i", 1, -2)
    assert little_endian("q", struct.pack("<q", 300)) == struct.pack(">q", 300)


def test_a_row_under_way_survives_a_load(tmp_path):
    """What it generates afterwards is not kept: its text left with the old contents."""
    cache = filled()
    cache.save(tmp_path / "outputs")
    one = drafter(cache)
    one.begin(*ragged([[1, 2, 3]]), None)
    cache.load(tmp_path / "outputs")
    propose(one, [[1, 2, 3, 4, 5]])
    one.end(*ragged([[1, 2, 3, 4, 5]]))
    assert stored(cache) == stored(filled())


def test_every_damaged_byte_is_noticed(tmp_path):
    path, damaged = tmp_path / "outputs", tmp_path / "damaged"
    filled().save(path)
    data = path.read_bytes()
    cache = make()
    generate(cache, [1], [3, 4])
    for i in range(len(data)):
        damaged.write_bytes(data[:i] + bytes([data[i] ^ (1 << i % 8)]) + data[i + 1 :])
        with pytest.raises(ValueError, match=r"suffix cache: expected .*, got .* in "):
            cache.load(damaged)
    for size in range(len(data)):
        damaged.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"suffix cache: expected .*, got .* in "):
            cache.load(damaged)
    damaged.write_bytes(data + b"\0")
    with pytest.raises(ValueError, match=r"expected .* bytes"):
        cache.load(damaged)
    assert stored(cache) == [[3, 4]]


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "outputs"
    cache = make(vocab_size=999)
    filled().save(path)
    with pytest.raises(ValueError, match="expected a vocabulary of 999, got 1000"):
        cache.load(path)
    path.write_bytes(b"PK\3\4" * 100)
    with pytest.raises(ValueError, match="expected a file that begins with"):
        cache.load(path)
    with pytest.raises(FileNotFoundError):
        cache.load(tmp_path / "none")
    wrong = make()
    generate(wrong, [1], [1000])
    wrong.save(path)
    with pytest.raises(ValueError, match="expected tokens from 0 to 999"):
        make().load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "outputs"
    filled().save(path)
    before = path.read_bytes()

    def fails(file):
        raise OSError("disk full")

    monkeypatch.setattr("specdec_kernels.drafting.suffix_cache.os.fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        make().save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["outputs"]


def test_errors():
    with pytest.raises(ValueError, match="expected max_requests from 1 to 1048576"):
        make(max_requests=0)
    with pytest.raises(ValueError, match="expected max_tokens from 1 to"):
        make(max_tokens=0)
    with pytest.raises(ValueError, match="expected max_depth from 2 to 1024, got 1"):
        native.cpu.SuffixBatch(1, max_depth=1)
    batch = native.cpu.SuffixBatch(2, max_depth=8)
    with pytest.raises(ValueError, match=r"tokens: expected shape"):
        batch.follow(ints([[1]]), ints([1]))
    with pytest.raises(TypeError, match="tokens: expected int32, got int64"):
        batch.follow(torch.tensor([[1], [2]]), ints([1, 1]))
    with pytest.raises(ValueError, match="expected tokens of at least 0"):
        batch.follow(ints([[1, -1, 1], [2, 2, 2]]), ints([3, 3]))
    with pytest.raises(ValueError, match="expected max_tokens of at least 0"):
        batch.draft(max_tokens=-1)
    with pytest.raises(ValueError, match="expected min_prob from 0 to 1"):
        batch.draft(max_tokens=1, min_prob=float("nan"))
    tree = native.cpu.SuffixTree(4)
    with pytest.raises(IndexError, match="no such text"):
        tree.extend(0, ints([1]))
    tree.close(tree.open())
    with pytest.raises(ValueError, match="the text is closed"):
        tree.extend(0, ints([1]))
    with pytest.raises(ValueError, match="lengths that add up"):
        make().native.load(b"\0" * 8, struct.pack("q", 3))
