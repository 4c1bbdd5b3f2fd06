import pytest
import torch
from helpers import backends

from specdec_kernels.ops import commit_kv_

BACKENDS = backends("commit_kv_")


def case(dtype, paged, seed=0):
    """Ragged caches with NaN wherever nothing was written, and the accepted paths."""
    g = torch.Generator().manual_seed(seed)
    batch, heads, slots, dim, layers = 3, 2, 40, 10, 4
    prefix_len = torch.tensor([5, 0, 21], dtype=torch.int32)
    path = torch.tensor(
        [[0, 2, 5, 9, -1], [0, -1, -1, -1, -1], [0, 1, 4, 6, 11]], dtype=torch.int32
    )
    num_kept = torch.tensor([4, 0, 5], dtype=torch.int32)
    table = None
    if paged:
        page, pages = 8, batch * 5
        table = torch.randperm(pages, generator=g).int().view(batch, 5)
    caches = []
    for _ in range(2 * layers):
        shape = (pages, page, heads, dim + 3) if paged else (batch, heads, slots + 7, dim + 3)
        cache = torch.randn(shape, generator=g).to(dtype)
        caches.append(cache[..., :dim] if paged else cache[:, :, :slots, :dim])
    return caches[:layers], caches[layers:], path, num_kept, prefix_len, table


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_moves_accepted_rows(backend, paged, dtype):
    k, v, path, num_kept, prefix_len, table = case(dtype, paged)
    before = [cache.clone() for cache in k + v]
    commit_kv_(k, v, path, num_kept, prefix_len, table, backend=backend)
    for cache, old in zip(k + v, before, strict=True):
        expected = old.clone()
        for b in range(3):
            for i in range(int(num_kept[b])):
                to, source = int(prefix_len[b]) + i, int(prefix_len[b] + path[b, i])
                if paged:
                    expected[table[b, to // 8], to % 8] = old[table[b, source // 8], source % 8]
                else:
                    expected[b, :, to] = old[b, :, source]
        assert torch.equal(cache, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("paged", [False, True])
def test_shapes_may_differ_between_caches(backend, paged):
    """Heads, sizes and strides: aligned to 16 bytes or to 2, one block of heads or several."""
    g = torch.Generator().manual_seed(1)
    path = torch.tensor([[0, 1, 3, 4, 7, 8, 9, 12, 15]], dtype=torch.int32).repeat(2, 2)[:, :9]
    num_kept, prefix_len = torch.tensor([9, 6]).int(), torch.tensor([3, 8]).int()
    table = torch.randperm(8, generator=g).int().view(2, 4) if paged else None
    for shapes in (((8, 64), (2, 128)), ((3, 129), (5, 7)), ((33, 64), (1, 256))):
        caches = []
        for heads, dim in shapes:
            size = (8, 8, heads, dim) if paged else (2, heads, 32, dim)
            caches.append(torch.randn(size, generator=g).bfloat16())
        same = [cache.clone() for cache in caches]
        commit_kv_(caches[:1], caches[1:], path, num_kept, prefix_len, table, backend=backend)
        commit_kv_(same[:1], same[1:], path, num_kept, prefix_len, table, backend="reference")
        assert all(torch.equal(a, b) for a, b in zip(caches, same, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_finished_rows_are_left_alone(backend):
    k, v, path, num_kept, prefix_len, _ = case(torch.float32, False)
    before = [cache.clone() for cache in k + v]
    commit_kv_(k, v, path, torch.zeros_like(num_kept), prefix_len, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(k + v, before, strict=True))


def test_errors_name_the_argument():
    k, v, path, num_kept, prefix_len, _ = case(torch.float32, False)
    with pytest.raises(TypeError, match=r"commit_kv_: expected path as int32, got int64"):
        commit_kv_(k, v, path.long(), num_kept, prefix_len)
    with pytest.raises(ValueError, match=r"commit_kv_: expected num_kept \[B\].*got \[2\]"):
        commit_kv_(k, v, path, num_kept[:2], prefix_len)
    with pytest.raises(ValueError, match="as many k as v"):
        commit_kv_(k, v[:1], path, num_kept, prefix_len)
    k[0].requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        commit_kv_(k, v, path, num_kept, prefix_len)


def test_opcheck_and_compile():
    k, v, path, num_kept, prefix_len, _ = case(torch.float32, False)
    op = torch.ops.specdec_kernels.commit_kv_.default
    torch.library.opcheck(op, (k, v, path, num_kept, prefix_len, None))
    k2, v2 = [c.clone() for c in k], [c.clone() for c in v]
    compiled = torch.compile(commit_kv_, fullgraph=True)
    compiled(k, v, path, num_kept, prefix_len)
    commit_kv_(k2, v2, path, num_kept, prefix_len)
    assert all(torch.equal(a, b) for a, b in zip(k + v, k2 + v2, strict=True))
