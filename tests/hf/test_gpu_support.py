"""When a model on a GPU is accelerated, without a GPU."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from specdec_kernels import dispatch

support = importlib.import_module("specdec_kernels.hf.support")  # the name of a function too


def on(*devices):
    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    return SimpleNamespace(parameters=lambda: parameters)


@pytest.mark.parametrize(
    "proven, reason", [("triton", None), ("reference", "no kernels have been")]
)
def test_a_gpu_model_needs_a_proven_attention(monkeypatch, proven, reason):
    monkeypatch.setattr(support, "default_on", lambda op, device: proven)
    found = support._device_reason(on("cuda:0"))
    assert found is reason if reason is None else found.startswith(reason)


def test_a_backend_that_is_asked_for_needs_no_proof(monkeypatch):
    monkeypatch.setattr(support, "why_unavailable", lambda backend, device: None)
    monkeypatch.setattr(support, "default_on", lambda op, device: pytest.fail("asked"))
    with dispatch.use_backend("triton"):
        assert support._device_reason(on("cuda:0")) is None


def test_other_devices_and_several_of_them_run_plain():
    assert "no kernels for xpu tensors" in support._device_reason(on("xpu:0"))
    assert "several devices" in support._device_reason(on("cuda:0", "cuda:1"))
    assert support._device_reason(on("cpu")) is None
