import math

import pytest
import torch

from specdec_kernels.ops import _numerics

SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1e-45,
    -1e-45,
    -1.0,
    88.72,
    88.73,
    -87.0,
    -88.0,
]


def ulps(value, exact):
    spacing = torch.nextafter(exact.float().abs(), torch.tensor(math.inf)) - exact.float().abs()
    return ((value.double() - exact).abs() / spacing.double()).max().item()


@pytest.mark.parametrize(
    "name, low, high, limit",
    [("exp", -87, 88.7, 1.0), ("log", -126, 127.9, 1.0), ("log1p", -1 + 2**-24, 1, 2.0)],
)
def test_error_in_ulps(name, low, high, limit):
    g = torch.Generator().manual_seed(0)
    x = torch.rand(1 << 18, generator=g) * (high - low) + low
    if name == "log":
        x = torch.cat([x.exp2(), torch.rand(1 << 16, generator=g) + 0.5])
    if name == "log1p":
        x = torch.cat([x, -torch.rand(1 << 16, generator=g).pow(8), -torch.tensor([1 - 2.0**-24])])
    assert ulps(getattr(_numerics, name)(x), getattr(torch, name)(x.double())) <= limit


def test_special_values():
    x = torch.tensor(SPECIAL)
    expected = x.double().exp().float().masked_fill(x < -87, 0.0)
    assert torch.equal(_numerics.exp(x).isnan(), x.isnan())
    torch.testing.assert_close(_numerics.exp(x), expected, rtol=3e-7, atol=0, equal_nan=True)
    expected = x.double().log().float()
    expected[5:7] = torch.tensor([-math.inf, math.nan])  # subnormal numbers count as 0
    torch.testing.assert_close(_numerics.log(x), expected, rtol=3e-7, atol=0, equal_nan=True)


def test_float64_is_exact():
    x = torch.rand(100, dtype=torch.float64)
    for name in ("exp", "log", "log1p"):
        assert torch.equal(getattr(_numerics, name)(x), getattr(torch, name)(x))
