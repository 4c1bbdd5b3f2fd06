import itertools
import math

import pytest
import torch
from helpers import backends
from sampling_cases import likely_children, poison, random_window

from specdec_kernels.ops.verify_greedy import verify_greedy
from specdec_kernels.tree import STATUS_EMPTY, STATUS_NAN, DraftTree

BACKENDS = backends("verify_greedy")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def slow_walk(target, ids, parents, num_nodes):
    """Longest path of nodes that equal the choice at their parent, by brute force over slots."""
    batch, width = ids.shape
    path = torch.full((batch, width), -1, dtype=torch.int32)
    output = torch.full((batch, width), -1)
    for b in range(batch):
        best = []
        for slot in range(int(num_nodes[b])):
            chain = [slot]
            while chain[-1] != 0:
                chain.append(int(parents[b, chain[-1]]))
            chain.reverse()
            links = itertools.pairwise(chain)
            if all(ids[b, c] == target[b, p] for p, c in links) and len(chain) > len(best):
                best = chain
        path[b, : len(best)] = torch.tensor(best, dtype=torch.int32)
        output[b, : len(best)] = target[b, best]
    return path, output


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [8, 111, 50257])
@pytest.mark.parametrize("width", [1, 2, 33, 64, 65])
def test_accepts_the_longest_matching_path(backend, dtype, vocab, width):
    if backend == "triton" and (width if vocab > 1000 else 0) > 2:
        pytest.skip("too long for the interpreter")
    g = torch.Generator().manual_seed(width)
    batch = 3 if vocab < 1000 else 2
    logits = torch.randn(batch, width, vocab, generator=g).to(dtype)
    ids, parents, num_nodes = random_window(g, batch, width, vocab)
    target = logits.float().argmax(-1)
    ids = likely_children(g, ids, parents, target, 0.8)
    result = verify_greedy(poison(logits, num_nodes), ids, parents, num_nodes, backend=backend)
    for b in range(batch):  # siblings with equal tokens: the first is followed, as in the op
        seen = set()
        for slot in range(1, width):
            pair = (int(parents[b, slot]), int(ids[b, slot]))
            if pair in seen:
                ids[b, slot] = -7
            seen.add(pair)
    path, output = slow_walk(target, ids, parents, num_nodes)
    assert torch.equal(result.path, path)
    assert torch.equal(result.output_token_ids, output)
    assert torch.equal(result.num_accepted, ((path >= 0).sum(-1) - 1).clamp(min=0).int())
    assert not result.status.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [1, 3, 111, 32000])
def test_ties_go_to_the_lowest_id(backend, vocab):
    tree = DraftTree.from_lists([[0, 1]], [[-1, 0]])
    for first in {0, vocab // 2, vocab - 1}:
        logits = torch.full((1, 2, vocab), -3.0)
        logits[..., first:] = 2.0
        result = verify_greedy(logits, *tree[:3], backend=backend)
        assert int(result.output_token_ids[0, 0]) == first


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_rows_are_flagged_where_they_decide(backend):
    vocab = 40
    logits = torch.zeros(5, 3, vocab)
    logits[..., 7] = 1.0
    logits[0, 0, 3] = math.nan  # falls back to the largest finite logit
    logits[0, 0, 4] = math.inf
    logits[1] = -math.inf
    logits[2] = math.nan
    logits[3, 0, 9] = math.inf
    logits[4, 2] = math.nan  # not on the path
    ids = torch.tensor([[1, 7, 7], [1, 0, 7], [1, 0, 7], [1, 9, 7], [1, 7, 3]])
    parents = torch.tensor([[-1, 0, 0]] * 5, dtype=torch.int32)
    num_nodes = torch.full((5,), 3, dtype=torch.int32)
    result = verify_greedy(logits, ids, parents, num_nodes, backend=backend)
    assert result.output_token_ids[:, :2].tolist() == [[7, 7], [0, 0], [0, 0], [9, 7], [7, 7]]
    assert result.status.tolist() == [STATUS_NAN, STATUS_EMPTY, STATUS_NAN, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_malformed_windows_end(backend):
    """Whatever the parents and counts hold, the walk ends inside the window."""
    g = torch.Generator().manual_seed(1)
    for _ in range(20):
        ids = torch.zeros(2, 5, dtype=torch.int64)
        parents = torch.randint(-9, 9, (2, 5), generator=g, dtype=torch.int32)
        num_nodes = torch.randint(-3, 9, (2,), generator=g, dtype=torch.int32)
        result = verify_greedy(torch.zeros(2, 5, 4), ids, parents, num_nodes, backend=backend)
        assert (result.num_accepted < 5).all()
        assert torch.equal(result.num_accepted < 0, torch.zeros(2, dtype=torch.bool))


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch(backend):
    ids = torch.zeros(0, 4, dtype=torch.int64)
    counts = torch.zeros(0, dtype=torch.int32)
    result = verify_greedy(torch.zeros(0, 4, 9), ids, ids.int(), counts, backend=backend)
    assert result.path.shape == (0, 4)


def test_threads_change_nothing():
    logits = torch.randn(1, 2, 50257, generator=torch.Generator().manual_seed(0))
    logits = (logits * 2).round()  # many ties
    tree = DraftTree.from_lists([[0, 1]], [[-1, 0]])
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(verify_greedy(logits, *tree[:3]).output_token_ids)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(r, results[0]) for r in results)
    assert int(results[0][0, 0]) == int(logits[0, 0].argmax())


def test_errors_name_the_argument():
    ids = torch.zeros(2, 3, dtype=torch.int64)
    counts = torch.ones(2, dtype=torch.int32)
    logits = torch.zeros(2, 3, 5)
    with pytest.raises(TypeError, match=r"verify_greedy: expected logits as float32.*got float64"):
        verify_greedy(logits.double(), ids, ids.int(), counts)
    with pytest.raises(TypeError, match="expected parents as int32, got int64"):
        verify_greedy(logits, ids, ids, counts)
    with pytest.raises(ValueError, match=r"expected num_nodes \[B\].*got \[1\]"):
        verify_greedy(logits, ids, ids.int(), counts[:1])
    with pytest.raises(ValueError, match="at least one token"):
        verify_greedy(logits[..., :0], ids, ids.int(), counts)
    with pytest.raises(ValueError, match="at least one slot"):
        verify_greedy(logits[:, :0], ids[:, :0], ids[:, :0].int(), counts)
    with pytest.raises(RuntimeError, match="requires grad"):
        verify_greedy(logits.requires_grad_(), ids, ids.int(), counts)


def test_opcheck_and_compile():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 111, generator=g)
    args = (logits, *random_window(g, 3, 5, 111))
    torch.library.opcheck(torch.ops.specdec_kernels.verify_greedy.default, args)
    compiled = torch.compile(verify_greedy, fullgraph=True)(*args)
    eager = verify_greedy(*args)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))
