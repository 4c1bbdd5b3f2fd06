import math

import pytest
import torch
from helpers import backends
from hypothesis import given
from hypothesis import strategies as st

from specdec_kernels.ops import build_tree, topk_logprobs, verify_greedy
from specdec_kernels.tree import PADDING_PARENT, DraftTree

BACKENDS = backends("build_tree")

NAN, INF = math.nan, math.inf


def row_tensors(root, token_ids, scores, parents):
    return (
        torch.tensor([root]),
        torch.tensor([token_ids], dtype=torch.int64).view(1, -1),
        torch.tensor([scores], dtype=torch.float32).view(1, -1),
        torch.tensor([parents], dtype=torch.int32).view(1, -1),
    )


def proper_candidates(g, batch, count, vocab=1000):
    """Cumulative scores with many ties, parents among the last few candidates or the root."""
    scores = torch.zeros(batch, count)
    parents = torch.zeros(batch, count, dtype=torch.int32)
    for b in range(batch):
        for i in range(count):
            parents[b, i] = int(torch.randint(max(-1, i - 12), max(i, 0), (1,), generator=g))
            above = scores[b, parents[b, i]] if parents[b, i] >= 0 else 0.0
            scores[b, i] = above - float(torch.randint(0, 5, (1,), generator=g)) / 4
    token_ids = torch.randint(0, vocab, (batch, count), generator=g)
    return torch.randint(0, vocab, (batch,), generator=g), token_ids, scores, parents


def brute_force(root, token_ids, scores, parents, size):
    """Paths of tokens to the root, each with the lowest of the best scores along it.

    Returns (path, first index) of the best size - 1 of them, best first.
    """
    paths = {-1: ()}
    best, first = {(): INF}, {(): -1}
    for i, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if parent < -1 or parent >= i or parent not in paths or token < 0:
            continue
        if math.isnan(scores[i]) or scores[i] == -INF:
            continue
        path = paths[i] = (*paths[parent], token)
        best[path] = max(best.get(path, -INF), scores[i])
        first.setdefault(path, i)

    def limited(path):
        return min(best[path[:end]] for end in range(len(path) + 1))

    ordered = sorted((p for p in best if p), key=lambda p: (-limited(p), first[p]))
    return ordered[: max(size - 1, 0)]


def assert_window(tree, b, root, paths, size):
    """Row b holds exactly the nodes `paths` in this order, and the padding that DraftTree has."""
    num = int(tree.num_nodes[b])
    assert num == (1 + len(paths) if size > 0 else 0)
    ids, parents = tree.draft_token_ids[b].tolist(), tree.parents[b].tolist()
    assert ids[0] == root and ids[max(num, 1) :] == [root] * (tree.width - max(num, 1))
    assert parents[num:] == [PADDING_PARENT] * (tree.width - num)
    assert parents[:1] == [-1 if num else PADDING_PARENT]
    slot_of = {(): 0} | {path: 1 + i for i, path in enumerate(paths)}
    for slot, path in enumerate(paths, 1):
        assert ids[slot] == path[-1]
        assert parents[slot] == slot_of[path[:-1]] < slot
    for slot in range(tree.width):
        words = tree.tree_mask[b, slot].tolist()
        bits = sum((word & (2**64 - 1)) << (64 * i) for i, word in enumerate(words))
        path = paths[slot - 1] if 0 < slot < num else ()
        ancestors = {slot_of[path[:end]] for end in range(len(path) + 1)} if slot < num else {slot}
        assert bits == sum(1 << a for a in ancestors)
        assert int(tree.depth[b, slot]) == len(path)


def check(columns, max_nodes, width, backend):
    tree = build_tree(*columns, max_nodes=max_nodes, width=width, backend=backend)
    same = build_tree(*columns, max_nodes=max_nodes, width=width, backend="reference")
    assert tree.draft_logits is None and tree.draft_vocab_map is None
    for got, expected in zip(tree[:5], same[:5], strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    for b, (root, *row, most) in enumerate(
        zip(*(x.tolist() for x in (*columns, max_nodes)), strict=True)
    ):
        size = min(most, width)
        assert_window(tree, b, root, brute_force(root, *row, size), size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 2, 33, 63, 64, 65, 130])
@pytest.mark.parametrize("count", [0, 1, 60, 300])
def test_against_brute_force(backend, width, count):
    count = min(count, 140) if backend == "triton" else count  # more than one block of either kind
    g = torch.Generator().manual_seed(width + count)
    columns = proper_candidates(g, 6, count, vocab=1000 if width % 2 else 4)
    max_nodes = torch.tensor([width, 0, 1, width + 9, -3, max(width // 2, 1)], dtype=torch.int32)
    check(columns, max_nodes, width, backend)


score = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, -1.0, -1.5, -2.0, -3e38, 1e-45, 7.0])
candidate = st.tuples(st.integers(-1, 3), score, st.integers(-3, 12))


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    candidates=st.lists(candidate, max_size=14),
    most=st.integers(-1, 12),
    width=st.integers(1, 10),
)
def test_fuzz_garbage(backend, candidates, most, width):
    columns = row_tensors(5, *([c[j] for c in candidates] for j in range(3)))
    check(columns, torch.tensor([most], dtype=torch.int32), width, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_fuzz_forests(backend, data):
    """Valid parents and scores below the parent's, with duplicates: every candidate can count."""
    count = data.draw(st.integers(0, 40))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(count)]
    scores: list[float] = []
    for parent in parents:
        step = data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))
        scores.append((scores[parent] if parent >= 0 else 0.0) - step)
    ids = [data.draw(st.integers(0, 2)) for _ in range(count)]
    most = data.draw(st.integers(0, 30))
    columns = row_tensors(5, ids, scores, parents)
    check(columns, torch.tensor([most], dtype=torch.int32), 30, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_examples(backend):
    def tree(*row, max_nodes=9):
        result = build_tree(*row_tensors(50, *row), max_nodes=max_nodes, backend=backend)
        return [x[0, : int(result.num_nodes)].tolist() for x in result[:2]]

    candidates = [7, 8, 9, 6], [-1, -2, -1.5, -2.5], [-1, -1, 0, 1]
    assert tree(*candidates) == [[50, 7, 9, 8, 6], [-1, 0, 1, 0, 3]]
    assert tree(*candidates, max_nodes=4) == [[50, 7, 9, 8], [-1, 0, 1, 0]]
    # a child with a better score than its parent waits for it
    assert tree([7, 8, 9], [-2, -1, -5], [-1, 0, -1]) == [[50, 7, 8, 9], [-1, 0, 1, 0]]
    assert tree([7, 8, 9], [-2, -1, -1.5], [-1, 0, -1], max_nodes=2) == [[50, 9], [-1, 0]]
    # what hangs on a dropped candidate goes too
    assert tree([7, 8, 9, 6], [NAN, -1, -2, -3], [-1, 0, 1, -1]) == [[50, 6], [-1, 0]]
    assert tree([7, 8, -1, 6], [-1, -2, -1, -3], [-1, 1, -1, 2]) == [[50, 7], [-1, 0]]
    # equal candidates: the best score, all children
    assert tree([7, 7, 1, 2], [-3, -1, -4, -2], [-1, -1, 0, 1]) == [[50, 7, 2, 1], [-1, 0, 1, 1]]
    assert tree([], [], []) == [[50], [-1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_is_the_best_smaller_tree(backend):
    count = 80 if backend == "triton" else 200
    columns = proper_candidates(torch.Generator().manual_seed(3), 2, count)
    large = build_tree(*columns, max_nodes=70, backend=backend)
    for size in (1, 2, 20, 69):
        small = build_tree(*columns, max_nodes=size, backend=backend)
        assert torch.equal(small.draft_token_ids, large.draft_token_ids[:, :size])
        assert torch.equal(small.parents, large.parents[:, :size])


@pytest.mark.parametrize("backend", BACKENDS)
def test_max_nodes_of_a_number_or_a_tensor(backend):
    columns = proper_candidates(torch.Generator().manual_seed(4), 3, 30)
    same = torch.full((3,), 8, dtype=torch.int32)
    expected = build_tree(*columns, max_nodes=same, width=8, backend=backend)
    for got in (
        build_tree(*columns, max_nodes=8, backend=backend),
        build_tree(*columns, max_nodes=8, width=8, backend=backend),
        build_tree(*columns, max_nodes=2**40, width=8, backend=backend),
        build_tree(*(x.t().contiguous().t() for x in columns), max_nodes=8, backend=backend),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got[:5], expected[:5], strict=True))
    finished = build_tree(*columns, max_nodes=-(2**40), backend=backend)
    assert finished.width == 1 and not finished.num_nodes.any()
    assert finished.parents.tolist() == [[PADDING_PARENT]] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_equal_candidates_end(backend):
    """On the CPU joining takes linear time, also where all candidates hang on the root."""
    count = 1000 if backend == "triton" else 20000
    ids = torch.arange(count)[None] % (3 * count // 4)
    scores, parents = torch.zeros(1, count), torch.full((1, count), -1, dtype=torch.int32)
    tree = build_tree(torch.tensor([3]), ids, scores, parents, max_nodes=65, backend=backend)
    assert tree.draft_token_ids[0].tolist() == [3, *range(64)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_expansion_with_topk_logprobs(backend):
    """EAGLE-2 on a model whose next token depends on the last one alone."""
    vocab, k, levels = 40, 4, 3
    model = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(5)) * 3
    root = torch.tensor([11, 2])
    token_ids, scores, parents = [], [], []
    frontier, above = root[:, None], torch.zeros(2, 1)
    hangs_on, count = torch.full((2, 1), -1), 0
    for _ in range(levels):
        logprobs, ids, _ = topk_logprobs(model[frontier].flatten(0, 1), k)
        each = (above[..., None] + logprobs.view(2, -1, k)).flatten(1)
        token_ids.append(ids.view(2, -1))
        scores.append(each)
        parents.append(hangs_on.repeat_interleave(k, 1).int())
        above, chosen = each.topk(k)
        frontier, hangs_on = token_ids[-1].gather(1, chosen), chosen + count
        count += each.shape[1]
    columns = [torch.cat(x, 1) for x in (token_ids, scores, parents)]
    tree = build_tree(root, *columns, max_nodes=10, backend=backend)
    logits = model[tree.draft_token_ids]
    found = verify_greedy(logits, *tree[:3])
    for b in range(2):  # the likeliest tokens are in the tree, so verification takes them
        token = int(root[b])
        for at in range(1 + int(found.num_accepted[b])):
            token = int(model[token].argmax())
            assert int(found.output_token_ids[b, at]) == token
        assert found.num_accepted[b] >= 1
    expected = DraftTree.from_lists(
        tree.draft_token_ids.tolist(), tree.parents.tolist(), width=tree.width
    )
    assert torch.equal(tree.tree_mask, expected.tree_mask)


def test_errors_name_the_argument():
    root, ids, scores, parents = proper_candidates(torch.Generator().manual_seed(0), 2, 5)
    with pytest.raises(TypeError, match=r"build_tree: expected token_ids as int64, got int32"):
        build_tree(root, ids.int(), scores, parents, max_nodes=4)
    with pytest.raises(ValueError, match=r"expected root_token_ids \[B\] with .*got \[1\]"):
        build_tree(root[:1], ids, scores, parents, max_nodes=4)
    with pytest.raises(TypeError, match=r"expected scores as float32, got bfloat16"):
        build_tree(root, ids, scores.bfloat16(), parents, max_nodes=4)
    with pytest.raises(ValueError, match=r"expected parents \[B, M\] with .*got \[2, 4\]"):
        build_tree(root, ids, scores, parents[:, :4], max_nodes=4)
    with pytest.raises(TypeError, match=r"expected max_nodes as int32, got int64"):
        build_tree(root, ids, scores, parents, max_nodes=torch.tensor([4, 4]), width=4)
    with pytest.raises(ValueError, match="expected width with a tensor max_nodes"):
        build_tree(root, ids, scores, parents, max_nodes=parents[:, 0])
    with pytest.raises(ValueError, match="expected width of at least 1, got 0"):
        build_tree(root, ids, scores, parents, max_nodes=4, width=0)
    with pytest.raises(RuntimeError, match="without gradients"):
        build_tree(root, ids, scores.requires_grad_(), parents, max_nodes=4)


def test_opcheck_and_compile():
    columns = proper_candidates(torch.Generator().manual_seed(0), 2, 30)
    max_nodes = torch.tensor([8, 5], dtype=torch.int32)
    op = torch.ops.specdec_kernels.build_tree.default
    torch.library.opcheck(op, (*columns, max_nodes, 9))
    compiled = torch.compile(build_tree, fullgraph=True)
    for arguments in ({"max_nodes": max_nodes, "width": 9}, {"max_nodes": 7}):
        got, expected = compiled(*columns, **arguments), build_tree(*columns, **arguments)
        assert all(torch.equal(a, b) for a, b in zip(got[:5], expected[:5], strict=True))
