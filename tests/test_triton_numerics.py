"""The Triton functions that sampling is made of, against PyTorch, bit for bit."""

import pytest
import torch
from test_numerics import SPECIAL
from test_random import KNOWN

from specdec_kernels import native
from specdec_kernels.ops import _numerics, _random
from specdec_kernels.ops.sample import reference

if not native.triton_interprets:
    pytest.skip("runs under Triton's interpreter", allow_module_level=True)

import triton
import triton.language as tl

from specdec_kernels.ops import _triton_numerics, _triton_random

BLOCK = 1 << 14


@triton.jit
def _numerics_kernel(x_ptr, exp_ptr, log_ptr, log1p_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(exp_ptr + at, _triton_numerics.exp(x))
    tl.store(log_ptr + at, _triton_numerics.log(x))
    tl.store(log1p_ptr + at, _triton_numerics.log1p(x))


@triton.jit
def _masses_kernel(x_ptr, mass_ptr, float_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mass = _triton_numerics.to_mass(tl.load(x_ptr + at))
    tl.store(mass_ptr + at, mass)
    tl.store(float_ptr + at, _triton_numerics.mass_as_float(mass * 12345))


@triton.jit
def _keys_kernel(x_ptr, key_ptr, value_ptr, index_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    key = _triton_numerics.pair_key(tl.load(x_ptr + at), at)
    tl.store(key_ptr + at, key)
    tl.store(value_ptr + at, _triton_numerics.pair_value(key))
    tl.store(index_ptr + at, _triton_numerics.pair_index(key))


@triton.jit
def _philox_kernel(seed, position, stream, block_ptr, words_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    block = tl.load(block_ptr + at).to(tl.uint32)
    w0, w1, w2, w3 = _triton_random.philox(seed, position, stream, block)
    tl.store(words_ptr + at * 4, w0.to(tl.int64))
    tl.store(words_ptr + at * 4 + 1, w1.to(tl.int64))
    tl.store(words_ptr + at * 4 + 2, w2.to(tl.int64))
    tl.store(words_ptr + at * 4 + 3, w3.to(tl.int64))


@triton.jit
def _noise_kernel(seed, position, u_ptr, gumbel_ptr, coin_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    u = _triton_random.uniforms(seed, position, 3, 0, BLOCK)
    tl.store(u_ptr + at, u)
    tl.store(gumbel_ptr + at, _triton_random.gumbel(u))
    tl.store(coin_ptr + at, _triton_random.coin(seed, position, at))


@triton.jit
def _bound_kernel(u_ptr, score_ptr, best, result_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    result = _triton_random.may_beat(tl.load(score_ptr + at), tl.load(u_ptr + at), best)
    tl.store(result_ptr + at, result.to(tl.int32))


def same_bits(got, expected):
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got[~nan].view(torch.int32), expected[~nan].view(torch.int32))


def awkward_floats():
    """Every exponent and sign, values near 1, and the special ones."""
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (BLOCK * 8,), generator=g).to(torch.int32)
    x = bits.view(torch.float32)
    x[:BLOCK] = torch.rand(BLOCK, generator=g) * 176 - 88
    x[BLOCK : 2 * BLOCK] = torch.rand(BLOCK, generator=g) * 2
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return x


def test_numerics():
    x = awkward_floats()
    x = torch.where((x != 0) & (x.abs() < 1.2e-38), 0.0, x)
    results = [torch.empty_like(x) for _ in range(3)]
    _numerics_kernel[(8,)](x, *results, BLOCK=BLOCK)
    for name, result in zip(("exp", "log"), results, strict=False):
        same_bits(result, getattr(_numerics, name)(x))
    inside = (x > -1) & (x < 1e30)
    same_bits(results[2][inside], _numerics.log1p(x[inside]))


def test_masses():
    g = torch.Generator().manual_seed(1)
    x = _numerics.exp(torch.rand(BLOCK, generator=g) * -40)
    x[:5] = torch.tensor([0.0, 1.0, 2.0**-41, 3 * 2.0**-41, 5 * 2.0**-41])  # ties to even
    mass, as_float = torch.empty(BLOCK, dtype=torch.int64), torch.empty(BLOCK)
    _masses_kernel[(1,)](x, mass, as_float, BLOCK=BLOCK)
    assert torch.equal(mass, reference.to_mass(x))
    assert mass[2:5].tolist() == [0, 2, 2]
    same_bits(as_float, reference.mass_as_float(mass * 12345, BLOCK))


def test_keys_order_as_values_do():
    x = awkward_floats()[:BLOCK].nan_to_num()
    key, value, index = (torch.empty(BLOCK, dtype=t) for t in (torch.int64, x.dtype, torch.int64))
    _keys_kernel[(1,)](x, key, value, index, BLOCK=BLOCK)
    assert torch.equal(value, x) and torch.equal(index, torch.arange(BLOCK))
    assert torch.equal(key.sort(descending=True).indices, x.sort(descending=True, stable=True)[1])


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_known_answers(counter, key, expected):
    if counter[2] >> 31:
        counter[2] -= 2**32
    seed, position = (low | high << 32 for low, high in (key, counter[:2]))
    words = torch.empty(4, 4, dtype=torch.int64)
    blocks = torch.full((4,), counter[3])
    signed = [x - 2**64 if x >> 63 else x for x in (seed, position)]
    _philox_kernel[(1,)](*signed, counter[2], blocks, words, BLOCK=4)
    assert " ".join(f"{int(w):08x}" for w in words[3]) == expected


def test_noise():
    for seed, position in ((5, 7), (-5, 2**40 + 3), (2**63 - 1, -1)):
        u, gumbel, coins = (torch.empty(BLOCK) for _ in range(3))
        _noise_kernel[(1,)](seed, position, u, gumbel, coins, BLOCK=BLOCK)
        at = torch.tensor([seed]), torch.tensor([position])
        same_bits(u, _random.uniforms(*at, 3, BLOCK)[0])
        same_bits(gumbel, _random.to_gumbel(u))
        same_bits(coins, _random.uniforms(*at, _random.ACCEPT, BLOCK)[0])


def test_bound_never_hides_a_winner():
    g = torch.Generator().manual_seed(2)
    u = _random.to_uniform(torch.randint(0, 2**32, (BLOCK,), generator=g))
    score = torch.randn(BLOCK, generator=g) * 5
    total = score + _random.to_gumbel(u)
    for best in (-1e4, -3.0, 0.0, 5.0, 12.0, float(total.max())):
        result = torch.empty(BLOCK, dtype=torch.int32)
        _bound_kernel[(1,)](u, score, best, result, BLOCK=BLOCK)
        assert result[total > best].all()
    assert result.sum() < 100  # and hides nearly everything else
