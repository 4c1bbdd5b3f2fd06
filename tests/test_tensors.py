"""How tensors pass to the kernels and back."""

import copy
import gc
import io
import os
import subprocess
import sys

import pytest
import torch

from specdec_kernels import native
from specdec_kernels.ops import linear_small_m, ngram_lookup, rms_norm

pytestmark = pytest.mark.skipif(native.cpu is None, reason="needs the compiled module")
X = torch.arange(24.0).view(2, 3, 4)
WEIGHT = torch.eye(4)


def test_a_result_is_a_tensor_like_any_other():
    y = linear_small_m(X, WEIGHT)
    assert y.is_contiguous() and y.data_ptr() % 64 == 0 and not y.requires_grad
    assert y.untyped_storage().nbytes() == y.nbytes
    assert torch.equal(copy.deepcopy(y), X)
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    assert torch.equal(torch.load(file), X)
    y += 1
    assert torch.equal(torch.from_numpy(y.numpy()), X + 1)
    assert torch.equal(torch.from_dlpack(y), X + 1)


def test_memory_lives_as_long_as_somebody_sees_it():
    views = [linear_small_m(X + i, WEIGHT)[1, 1:] for i in range(200)]
    gc.collect()
    junk = [torch.full((2, 3, 4), -1.0) for _ in range(200)]
    assert all(torch.equal(view, X[1, 1:] + i) for i, view in enumerate(views))
    assert len(junk) == 200


def test_memory_is_given_back():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not os.path.exists("/proc/self/statm"):
        pytest.skip("needs /proc")
    big = torch.zeros(64, 1 << 14)  # 4 MiB
    one = torch.ones(1 << 14)
    rms_norm(big, one, 1e-5)
    before = resident()
    for _ in range(200):
        rms_norm(big, one, 1e-5)
    assert resident() - before < 100 << 20


def test_inference_mode_makes_inference_tensors():
    with torch.inference_mode():
        assert linear_small_m(X, WEIGHT).is_inference()
    assert not linear_small_m(X, WEIGHT).is_inference()


def test_other_kinds_of_tensors():
    class Mine(torch.Tensor):
        pass

    expected = linear_small_m(X, WEIGHT)
    for weight in (torch.nn.Parameter(WEIGHT, requires_grad=False), WEIGHT.as_subclass(Mine)):
        assert torch.equal(linear_small_m(X, weight).as_subclass(torch.Tensor), expected)
    with pytest.raises(TypeError, match="got float64"):
        linear_small_m(X.double(), WEIGHT.double())
    with pytest.raises(TypeError, match="expected x as a tensor"):
        linear_small_m("x", WEIGHT)
    with pytest.raises(TypeError, match="expected weight as a tensor"):
        linear_small_m(X, [1.0])
    with pytest.raises(TypeError, match="expected weight as a tensor"):
        rms_norm(X, [1.0], 1e-5)
    many = X.view(1, 1, 1, 2, 3, 4)
    assert torch.equal(linear_small_m(many, WEIGHT), many)


def test_many_dimensions_of_the_lookup_are_refused():
    tokens, lens = torch.zeros(1, 1, 8, dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"ngram_lookup: expected tokens \[B, S\]"):
        ngram_lookup(tokens, lens, min_n=1, max_n=2, k=2)


WITHOUT_DLPACK = """
import torch
del torch.Tensor.__dlpack_c_exchange_api__
from specdec_kernels.cli import main
raise SystemExit(main(["doctor"]))
"""


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has none anyway"
)
def test_kernels_run_without_the_interface():
    done = subprocess.run([sys.executable, "-c", WITHOUT_DLPACK], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all self-tests passed" in done.stdout
