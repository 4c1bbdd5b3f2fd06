import math
import random

import pytest
import torch
from helpers import backends
from sampling_cases import is_slow

from specdec_kernels import native
from specdec_kernels.ops.tree_attention import _cuda, reference, tree_attention
from specdec_kernels.tree import masks_from_parents

BACKENDS = backends("tree_attention")

NAN = float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_parents(r, nodes):
    return [r.randrange(max(0, i - 4), i) if i else -1 for i in range(nodes)]


def case(
    *, batch=2, size=7, heads=(4, 2), dims=(64, 64), ctx=65, dtype=torch.float32, tree=True, seed=0
):
    """Ragged rows with strided q, k and v, NaN wherever nothing was written, and their trees."""
    g = torch.Generator().manual_seed(seed)
    r = random.Random(seed)
    (q_heads, kv_heads), (dim, v_dim) = heads, dims
    slots = ctx + size + 5

    def randn(*shape):
        return torch.randn(shape, generator=g).to(dtype)

    q = randn(batch, q_heads, size, dim + 2)[..., :dim].transpose(1, 2)
    k = randn(batch, kv_heads, slots + 3, dim + 1)[:, :, :slots, :dim]
    v = randn(batch, kv_heads, slots + 3, v_dim + 1)[:, :, :slots, :v_dim]
    prefix_len = torch.tensor([max(0, ctx - 5 * b) for b in range(batch)], dtype=torch.int32)
    num_nodes = torch.tensor([max(1, size - b) for b in range(batch)], dtype=torch.int32)
    for b in range(batch):
        end = int(prefix_len[b] + num_nodes[b])
        k[b, :, end:], v[b, :, end:] = NAN, NAN
        q[b, int(num_nodes[b]) :] = NAN
    mask = depth = None
    if tree:
        words, depths = masks_from_parents([random_parents(r, int(n)) for n in num_nodes], size)
        mask = torch.tensor(words).view(batch, size, -1)
        depth = torch.tensor(depths, dtype=torch.int32).view(batch, size)
    return [q, k, v, prefix_len, num_nodes, mask, depth]


def double(args):
    return [a.double() if a is not None and a.is_floating_point() else a for a in args]


def plain_attention(args, scale, window=None, softcap=None, sinks=None):
    """A dense mask and PyTorch operations in the dtype of q: what the two-error rule allows for."""
    q, k, v, prefix_len, num_nodes, mask, depth = args
    group = q.shape[2] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float32)
    for b in range(q.shape[0]):
        n, end = int(num_nodes[b]), int(prefix_len[b] + num_nodes[b])
        seen = reference.visible_keys(
            b, int(prefix_len[b]), n, q.shape[1], mask, depth, window, q.device
        )
        keys = k[b, :, :end].repeat_interleave(group, 0)
        values = v[b, :, :end].repeat_interleave(group, 0)
        scores = q[b, :n].transpose(0, 1) @ keys.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            column = sinks[:, None, None].expand(-1, n, 1).to(scores.dtype)
            scores = torch.cat((scores, column), -1)
        weights = scores.softmax(-1)[..., :end]
        out[b, :n] = (weights @ values).transpose(0, 1)
        lse[b, :, :n] = scores.float().logsumexp(-1)
    return out, lse


def check(args, backend, layouts=("dense",), **options):
    """The two-error rule on out and lse, and what padding must be."""
    options.setdefault("scale", args[0].shape[-1] ** -0.5)
    right = reference.tree_attention(*double(args), **options)
    plain = plain_attention(args, **options)
    for layout in layouts:
        q, k, v, *rest = args
        more = dict(options)
        if layout == "split":
            more["split_size"] = 64
        if layout == "paged":
            table = more["block_table"] = permuted_table(args)
            k, v = to_pages(k, table), to_pages(v, table)
        compare(args, tree_attention(q, k, v, *rest, **more, backend=backend), right, plain)


def compare(args, ours, right, plain):
    out, lse = ours
    assert out.dtype == args[0].dtype and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    padding = torch.arange(out.shape[1]) >= args[4][:, None]
    assert (out[padding] == 0).all() and (lse.transpose(1, 2)[padding] == -math.inf).all()
    pairs = [(out, right[0], plain[0])]
    pairs.append(tuple(x.transpose(1, 2) for x in (lse, right[1], plain[1])))
    for got, exact, same in ([x[~padding] for x in triple] for triple in pairs):
        error = (got.double() - exact).abs().max()
        allowed = 2 * (same.double() - exact).abs().max() + 1e-6 * (1 + exact.abs().max())
        assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def to_pages(cache, table, page=8):
    """The contiguous cache in the pages of `table`; all other memory is NaN."""
    pages = torch.full(
        (int(table.max()) + 2, page, cache.shape[1], cache.shape[3] + 1), NAN, dtype=cache.dtype
    )
    slots = torch.arange(cache.shape[2])
    for b in range(cache.shape[0]):
        pages[table[b, slots // page], slots % page, :, :-1] = cache[b].transpose(0, 1)
    return pages[..., :-1]


def permuted_table(args, page=8, seed=3):
    blocks = (args[1].shape[2] + page - 1) // page
    order = torch.randperm(args[0].shape[0] * blocks, generator=torch.Generator().manual_seed(seed))
    return order.int().view(args[0].shape[0], blocks)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7, 33, 63, 64, 65, 130])
def test_sizes_of_the_window(backend, dtype, tree, size):
    check(case(size=size, ctx=70, dtype=dtype, tree=tree, seed=size), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ctx", [0, 1, 63, 64, 65, 300])
def test_sizes_of_the_prefix(backend, dtype, ctx):
    check(case(size=9, ctx=ctx, dtype=dtype, seed=ctx), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (4, 1), (8, 1), (7, 7)])
@pytest.mark.parametrize("size", [1, 5])
def test_grouped_heads(backend, dtype, heads, size):
    check(case(size=size, heads=heads, dtype=dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dims",
    [
        *((n, n) for n in (64, 80, 96, 128, 192, 256, 10, 1)),
        *((96, 64), (24, 129), (192, 128), (33, 31)),
    ],
)
@pytest.mark.parametrize("size", [1, 6])
def test_head_sizes(backend, dtype, dims, size):
    check(case(size=size, dims=dims, dtype=dtype), backend)


OPTIONS = [
    {"window": 1},
    {"window": 3},
    {"window": 20},
    {"window": 64},
    {"window": 1000},
    {"softcap": 1.5},
    {"softcap": 50.0},
    {"sinks": True},
    {"window": 30, "softcap": 5.0, "sinks": True},
    {"scale": 2.5},
    {"scale": -0.3},
    {"scale": 0.0},
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
def test_options(backend, dtype, tree, options):
    args = case(size=20, ctx=90, heads=(6, 2), dtype=dtype, tree=tree, seed=5)
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = torch.linspace(-3, 3, 6)
    check(args, backend, ("dense", "paged", "split"), **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("options", [{}, {"window": 150}, {"window": 37, "softcap": 4.0}])
def test_several_blocks_of_keys(backend, dtype, size, options):
    heads = (6, 2) if backend != "triton" else (3, 1)
    args = case(size=size, ctx=420, heads=heads, dims=(64, 96), dtype=dtype, seed=size)
    check(args, backend, ("dense", "split"), **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 16, 64, 128, 100])
@pytest.mark.parametrize("size", [2, 30])
def test_sizes_of_pages(backend, dtype, page, size):
    """Dense rows of a page, rows that straddle pages, and the cache as it was give the same."""
    ctx = 300 if backend != "triton" else 140
    args = case(size=size, ctx=ctx, heads=(4, 2), dims=(64, 64), dtype=dtype, seed=page)
    table = permuted_table(args, page)
    k, v = (to_pages(cache, table, page) for cache in args[1:3])
    options = {"scale": 0.2, "window": 2 * ctx // 3, "backend": backend}
    if backend == "triton":  # it splits by the room in the cache, which pages round up
        options["split_size"] = 128
    paged = tree_attention(args[0], k, v, *args[3:], block_table=table, **options)
    dense = tree_attention(*args, **options)
    assert all(torch.equal(a, b) for a, b in zip(paged, dense, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_path_alone_is_plain_causal_attention(backend):
    """An independent oracle: the root-to-node path as a sequence of its own."""
    args = case(size=25, ctx=30, heads=(6, 3), dims=(24, 16), seed=8)
    q, k, v, prefix_len, num_nodes, mask, depth = args
    out, _ = tree_attention(*args, scale=0.2, backend=backend)
    for b in range(2):
        prefix = int(prefix_len[b])
        for node in range(int(num_nodes[b])):
            path = [j for j in range(25) if mask[b, node, 0] >> j & 1]
            assert len(path) == depth[b, node] + 1
            slots = [*range(prefix), *(prefix + j for j in path)]
            alone = torch.nn.functional.scaled_dot_product_attention(
                q[b, node, :, None],
                k[b][:, slots].repeat_interleave(2, 0),
                v[b][:, slots].repeat_interleave(2, 0),
                scale=0.2,
            )
            torch.testing.assert_close(out[b, node], alone[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_mask_for_all_rows(backend):
    args = case(batch=3, size=70, ctx=10)
    args[4][:] = 66
    args[1][:], args[2][:] = args[1].nan_to_num(0.5), args[2].nan_to_num(0.5)
    args[0][:] = args[0].nan_to_num(0.5)
    shared = [*args[:5], args[5][:1], args[6][:1].repeat(3, 1)]
    repeated = [*shared[:5], shared[5].repeat(3, 1, 1), shared[6]]
    one = tree_attention(*shared, scale=0.1, window=9, backend=backend)
    many = tree_attention(*repeated, scale=0.1, window=9, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_is_the_tree_with_one_child_per_node(backend):
    chain = case(size=67, ctx=20, tree=False)
    words, depths = masks_from_parents([list(range(-1, 66)), list(range(-1, 65))], 67)
    tree = [*chain[:5], torch.tensor(words).view(2, 67, -1), torch.tensor(depths).int()]
    for window in (None, 5, 30):
        a = tree_attention(*chain, scale=0.1, window=window, backend=backend)
        b = tree_attention(*tree, scale=0.1, window=window, backend=backend)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split_size", [0, 64])
def test_finished_rows_read_nothing(backend, split_size):
    args = case(batch=3, size=5, ctx=100)
    args[4][1] = 0
    args[3][1] = 2**31 - 1
    for tensor in args[:3]:
        tensor[1] = NAN
    args[5][1], args[6][1] = -1, 2**31 - 1
    options = {"scale": 1.0, "backend": backend, "split_size": split_size}
    out, lse = tree_attention(*args, sinks=torch.ones(4), **options)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    assert out.isfinite().all() and lse[0].isfinite().all()
    args[4][:] = 0
    out, lse = tree_attention(*args, **options)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_freed_pages_outside_the_window_are_not_read(backend):
    args = case(batch=1, size=4, ctx=100, tree=False)
    table = permuted_table(args)
    k, v = (to_pages(cache, table) for cache in args[1:3])
    whole = tree_attention(
        args[0], k, v, *args[3:], scale=1.0, window=16, block_table=table, backend=backend
    )
    freed = table.clone()
    for block in range((100 - 16 + 1) // 8):
        k[table[0, block]], v[table[0, block]] = NAN, NAN
        freed[0, block] = -1
    after = tree_attention(
        args[0], k, v, *args[3:], scale=1.0, window=16, block_table=freed, backend=backend
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, after, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_query_stays_in_its_row(backend):
    args = case(batch=1, size=6, ctx=10)
    args[0][0, 2] = NAN
    out, lse = tree_attention(*args, scale=1.0, backend=backend)
    assert out[0, 2].isnan().all() and lse[0, :, 2].isnan().all()
    assert out[0, [0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_empty(backend, shape):
    batch, size = shape
    q, cache = torch.randn(batch, size, 4, 8), torch.randn(batch, 2, 16, 8)
    lengths = torch.ones(batch, dtype=torch.int32)
    nodes = torch.full((batch,), min(size, 1), dtype=torch.int32)
    out, lse = tree_attention(q, cache, cache, lengths, nodes, scale=1.0, backend=backend)
    assert out.shape == (batch, size, 4, 8) and lse.shape == (batch, 4, size)


needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="no compiled module")
KERNELS = [b for b in BACKENDS if b != "reference"]  # what promises bits


FIXED_SPLITS = {
    "cpu": [(dtype, split_size) for dtype in DTYPES for split_size in (64, 100, 512)],
    "triton": [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 512)],
    "cuda": [
        (torch.float32, 64),
        (torch.bfloat16, 64),
        (torch.float16, 100),
        (torch.bfloat16, 512),
    ],
}


@pytest.mark.parametrize(
    "backend, dtype, split_size",
    [(b, *case) for b in BACKENDS for case in FIXED_SPLITS.get(b, [])],
)
@pytest.mark.parametrize("window", [None, 37])
def test_fixed_splits_make_a_slot_independent_of_the_rest(backend, dtype, split_size, window):
    """Bitwise: alone, in a window of 33 or all, in a batch, with one thread or three."""
    width, ctx, heads = (150, 280, (9, 3)) if backend == "cpu" else (70, 140, (3, 1))
    args = case(batch=3, size=width, ctx=ctx, heads=heads, dims=(72, 40), dtype=dtype, tree=False)
    options = {"scale": 0.3, "window": window, "split_size": split_size, "backend": backend}
    out, lse = tree_attention(*args, **options)
    if backend == "cpu":
        threads = torch.get_num_threads()
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                again = tree_attention(*args, **options)
                assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
        finally:
            torch.set_num_threads(threads)
    q, k, v, prefix_len = args[:4]
    for few in (1, 2, 33):
        nodes = torch.full((3,), few, dtype=torch.int32)
        part = tree_attention(q[:, :few], k, v, prefix_len, nodes, **options)
        assert torch.equal(part[0], out[:, :few]) and torch.equal(part[1], lse[..., :few])
    for b in range(3):
        one = slice(b, b + 1)
        alone = tree_attention(q[one], k[one], v[one], prefix_len[one], args[4][one], **options)
        assert torch.equal(alone[0], out[one]) and torch.equal(alone[1], lse[one])
    for slot in (1, 30, width - 3):  # the slot as the root behind a longer prefix
        root = torch.ones(3, dtype=torch.int32)
        alone = tree_attention(q[:, slot : slot + 1], k, v, prefix_len + slot, root, **options)
        assert torch.equal(alone[0][:, 0], out[:, slot])


HEADS = [(1, 1), (4, 1), (12, 2), (8, 1)]
OPTIONS = [{}, {"window": 50}, {"softcap": 2.0}, {"scale": -0.1}]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_number_of_rows_shows_in_no_bit(backend, dtype, heads, options):
    """Few rows and many are computed in different ways, as are blocks with and without a mask."""
    place = DTYPES.index(dtype) + HEADS.index(heads) + OPTIONS.index(options)
    if is_slow(backend) and place % 4:
        pytest.skip("one in four where GPU code runs on the CPU")
    args = case(batch=1, size=66, ctx=190, heads=heads, dims=(80, 48), dtype=dtype, tree=False)
    q, k, v, prefix_len, _ = args[:5]
    options = {"scale": 0.15, "split_size": 192, "backend": backend} | options
    out, lse = tree_attention(*args, **options)
    for size in (1, 2, 3, 5, 9, 17, 40):
        nodes = torch.tensor([size], dtype=torch.int32)
        part = tree_attention(q[:, :size], k, v, prefix_len, nodes, **options)
        assert torch.equal(part[0], out[:, :size]) and torch.equal(part[1], lse[..., :size])
    for slot in (2, 30, 65):
        root = torch.ones(1, dtype=torch.int32)
        alone = tree_attention(q[:, slot : slot + 1], k, v, prefix_len + slot, root, **options)
        assert torch.equal(alone[0][:, 0], out[:, slot])


hopper_only = pytest.mark.skipif(
    not native.cuda_is_emulated
    and not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9),
    reason="needs sm_90 or the emulation",
)


@hopper_only
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(
    ("size", "heads", "dims", "options"),
    [
        (1, (4, 2), (64, 64), {}),
        (33, (6, 2), (80, 64), {"window": 30, "softcap": 5.0, "sinks": True}),
        (70, (4, 1), (128, 128), {}),
        (9, (2, 1), (192, 128), {"window": 100}),
        (40, (3, 1), (256, 256), {"scale": -0.1}),
    ],
)
def test_the_kernel_for_hopper(dtype, tree, size, heads, dims, options):
    args = case(size=size, ctx=150, heads=heads, dims=dims, dtype=dtype, tree=tree, seed=size)
    device = "cpu" if native.cuda_is_emulated else "cuda"
    scale = options.get("scale", dims[0] ** -0.5)
    sinks = torch.linspace(-3, 3, heads[0]) if "sinks" in options else None
    window, softcap = options.get("window"), options.get("softcap")
    more = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    right = reference.tree_attention(*double(args), **more)
    plain = plain_attention(args, **more)
    table = permuted_table(args, 16)
    pages = [to_pages(cache, table, 16).contiguous() for cache in args[1:3]]
    dense = [cache.contiguous() for cache in args[1:3]]
    for (k, v), block_table in ((dense, None), (pages, table)):
        inputs = [args[0], k, v, *args[3:], sinks, block_table]
        inputs = [x if x is None else x.to(device) for x in inputs]
        ours = _cuda(*inputs, scale, window, softcap, hopper=True)
        compare(args, [x.cpu() for x in ours], right, plain)


def test_errors_name_the_argument():
    args = case(size=70)
    q, k, v, prefix_len, num_nodes, mask, depth = args

    def raises(error, match, *changed, **options):
        with pytest.raises(error, match="tree_attention: " + match):
            tree_attention(*changed, **{"scale": 1.0, **options})

    rest = (prefix_len, num_nodes)
    raises(TypeError, "expected k as float32, got bfloat16", q, k.bfloat16(), v, *rest)
    raises(TypeError, "expected q as float32 or .*, got float64", q.double(), k, v, *rest)
    raises(ValueError, r"expected k \[B, Hkv, S, D\]", q, k[..., :9], v, *rest)
    raises(ValueError, r"expected v \[B, Hkv, S, Dv\]", q, k, v[:, :, 1:], *rest)
    raises(ValueError, "expected v with a dense last", q, k, v[..., ::2], *rest)
    raises(ValueError, "expected Hkv to divide Hq", q[:, :, :3], k, v, *rest)
    raises(TypeError, "expected prefix_len as int32, got int64", q, k, v, rest[0].long(), rest[1])
    raises(ValueError, r"expected num_nodes \[B\]", q, k, v, prefix_len, num_nodes[:1])
    raises(ValueError, r"expected tree_mask \[B, T, W\]", q, k, v, *rest, mask[:, :5], depth)
    raises(TypeError, "expected tree_mask as int64, got int32", q, k, v, *rest, mask.int(), depth)
    raises(ValueError, ".*at least 2 words for T 70, got 1", q, k, v, *rest, mask[..., :1], depth)
    raises(ValueError, r"expected depth \[B, T\]", q, k, v, *rest, mask, depth[:, 1:])
    raises(ValueError, "expected depth with tree_mask and window", q, k, v, *rest, mask, window=4)
    raises(ValueError, "expected window >= 1 or None, got 0", *args, window=0)
    raises(ValueError, "expected softcap > 0 or None, got -1", *args, softcap=-1.0)
    raises(ValueError, "expected split_size >= 0, got -1", *args, split_size=-1)
    raises(ValueError, r"expected sinks \[Hq\]", *args, sinks=torch.ones(3))
    raises(TypeError, "expected sinks as float32", *args, sinks=torch.ones(4).half())
    paged = [q, torch.ones(6, 8, 2, 64), torch.ones(6, 8, 2, 64), *rest]
    raises(TypeError, "expected block_table as int32", *paged, block_table=torch.ones(2, 3))
    raises(RuntimeError, ".*requires grad", q.clone().requires_grad_(), k, v, *rest)


@needs_cpu
def test_lengths_outside_the_cache_are_refused():
    q, k, v, prefix_len, num_nodes, *_ = args = case(tree=False)
    rest = {"scale": 1.0, "backend": "cpu"}
    with pytest.raises(ValueError, match=r"tree_attention: .*prefix_len \+ num_nodes <= 77 slots"):
        tree_attention(q, k, v, prefix_len + 50, num_nodes, **rest)
    with pytest.raises(ValueError, match=r"tree_attention: expected num_nodes in 0..T, got 8"):
        tree_attention(q, k, v, prefix_len, num_nodes + 1, **rest)
    table = permuted_table(args)
    pages = [to_pages(cache, table) for cache in (k, v)]
    table[1, 2] = 10**6
    with pytest.raises(ValueError, match=r"tree_attention: expected pages .* got 1000000"):
        tree_attention(q, *pages, prefix_len, num_nodes, block_table=table, **rest)


def test_opcheck_and_compile():
    args = case(dims=(16, 24))
    op = torch.ops.specdec_kernels.tree_attention.default
    args[0][:] = args[0].nan_to_num(0.0)
    torch.library.opcheck(op, (*args, torch.ones(4), None, 0.25, 8, 2.0, 64))
    compiled = torch.compile(tree_attention, fullgraph=True)
    got = compiled(*args, scale=0.25, window=8)
    expected = tree_attention(*args, scale=0.25, window=8)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
