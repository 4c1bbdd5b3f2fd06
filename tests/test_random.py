import pytest
import torch
from scipy import stats

from specdec_kernels.ops import _random

# Known answers of Philox4x32-10 from the Random123 distribution.
KNOWN = [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_known_answers(counter, key, expected):
    words = _random.philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert " ".join(f"{int(w):08x}" for w in words) == expected


def test_uniform_is_never_0_or_1():
    u = _random.to_uniform(torch.tensor([0, 1, 0x7FFFFFFF, 0xFFFFFF7F, 0xFFFFFFFF]))
    assert u.dtype == torch.float32
    assert u[0] == 2.0**-33 and u[-1] == 1 - 2.0**-24
    assert ((u > 0) & (u < 1)).all()
    assert _random.to_gumbel(u).isfinite().all()
    assert float(_random.to_gumbel(u[:1])) < 22.9  # the bound that the kernels prune with


def test_counter_layout():
    """Each of seed, position (all 64 bits), stream and index changes the numbers."""
    seed = torch.tensor([5, 6, 5 + 2**32, 5, 5, -5])
    position = torch.tensor([7, 7, 7, 8, 7 + 2**32, 7])
    u = _random.uniforms(seed, position, _random.BONUS, 11)
    assert u.shape == (6, 11) and len(u.flatten().unique()) == 66
    other = _random.uniforms(seed, position, _random.ACCEPT, 11)
    assert not torch.isin(u, other).any()
    words = [torch.tensor(x) for x in (7, 0, _random.BONUS, 2)]
    block = torch.stack(_random.philox(words, [torch.tensor(5), torch.tensor(0)]))
    assert torch.equal(u[0, 8:], _random.to_uniform(block)[:3])


def test_uniform_and_gumbel_distribution():
    u = _random.uniforms(torch.arange(100), torch.arange(100), _random.DRAFT, 2000).flatten()
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6
    assert stats.kstest(_random.to_gumbel(u).numpy(), "gumbel_r").pvalue > 1e-6
