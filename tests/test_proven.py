"""Which GPU path may run by itself, without a GPU: the device's name is made up."""

from __future__ import annotations

import json

import pytest
import torch

from specdec_kernels import dispatch, native, proven

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch, tmp_path):
    """A device with both kinds of kernels, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    for name in ("triton", "cuda"):
        monkeypatch.setattr(native, f"{name}_error", None)
    monkeypatch.setattr(native, "triton_interprets", False)
    monkeypatch.setattr(native, "cuda_is_emulated", False)
    module = tmp_path / "_cuda.so"
    module.write_bytes(b"compiled")
    monkeypatch.setattr(native, "cuda", type("Module", (), {"__file__": str(module)}))
    monkeypatch.setattr(proven.importlib.metadata, "version", lambda name: "9.9")
    forget()
    yield
    forget()


def forget():
    """As a new process starts."""
    proven.is_proven.cache_clear()
    proven._hash.cache_clear()
    dispatch._default_implementation.cache_clear()


def record(**results):
    proven.record({("an_op", path.replace("_", "-")): ok for path, ok in results.items()}, DEVICE)
    forget()


def test_nothing_is_proven_before_the_suite_has_run():
    assert not proven.is_proven("an_op", "triton", DEVICE)
    assert proven.proven_on(DEVICE) == {}


def test_what_passed_is_proven_and_what_fails_later_no_more():
    record(triton=True, cuda=True, cuda_hopper=False)
    assert proven.is_proven("an_op", "triton", DEVICE)
    assert not proven.is_proven("an_op", "cuda-hopper", DEVICE)
    assert not proven.is_proven("another", "triton", DEVICE)
    assert not proven.is_proven("an_op", "triton", torch.device("cpu"))
    record(triton=False, cuda_hopper=True)
    assert proven.proven_on(DEVICE) == {"an_op": ["cuda", "cuda-hopper"]}


def test_unknown_paths_are_named():
    with pytest.raises(ValueError, match="expected one of cuda, cuda-hopper, triton, got 'cpu'"):
        proven.is_proven("an_op", "cpu", DEVICE)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch, folder: patch.setattr(torch.cuda, "get_device_name", lambda d: "another"),
        lambda patch, folder: patch.setattr("specdec_kernels.__version__", "99"),
        lambda patch, folder: patch.setattr(torch, "__version__", "99"),
        lambda patch, folder: (folder / "_cuda.so").write_bytes(b"compiled anew"),
    ],
    ids=["device", "package", "torch", "module"],
)
def test_a_record_counts_for_what_it_was_made_with(monkeypatch, tmp_path, change):
    record(cuda=True)
    change(monkeypatch, tmp_path)
    forget()
    assert not proven.is_proven("an_op", "cuda", DEVICE)


def test_a_record_of_triton_counts_for_its_version(monkeypatch):
    record(triton=True)
    monkeypatch.setattr(proven.importlib.metadata, "version", lambda name: "10")
    forget()
    assert not proven.is_proven("an_op", "triton", DEVICE)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": 99}', '{"format": 1}', '{"format": 1, "proven": [1]}',
     '{"format": 1, "proven": {"a": {"b": 3}}}'],
)  # fmt: skip
def test_a_foreign_file_counts_as_empty_and_is_replaced(text):
    proven.file().parent.mkdir(parents=True)
    proven.file().write_text(text)
    assert proven.proven_on(DEVICE) == {}
    record(triton=True)
    assert json.loads(proven.file().read_text())["format"] == proven.FORMAT
    assert proven.is_proven("an_op", "triton", DEVICE)
    assert [p.name for p in proven.file().parent.iterdir()] == ["proven.json"]


def test_a_path_that_does_not_exist_is_never_proven(monkeypatch):
    record(triton=True)
    monkeypatch.setattr(native, "triton_error", "triton is not installed")
    forget()
    assert not proven.is_proven("an_op", "triton", DEVICE)
    record(triton=True)  # says nothing


# ---- the default


@pytest.fixture
def table(monkeypatch):
    names = ("cpu", "reference", "triton", "cuda")
    implementations = {name: lambda *args, name=name: name for name in names}
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "an_op", implementations)
    return implementations


@pytest.mark.parametrize(
    "passed, chosen",
    [
        ({}, "reference"),
        ({"triton": True}, "triton"),
        ({"cuda": True}, "cuda"),
        ({"triton": True, "cuda": True}, "cuda"),
        ({"triton": True, "cuda": False}, "triton"),
        ({"cuda_hopper": True}, "reference"),
    ],
)
def test_the_first_proven_path_is_the_default(table, passed, chosen):
    record(**passed)
    assert dispatch.default_on("an_op", DEVICE) == chosen
    assert dispatch._default_implementation("an_op", DEVICE)() == chosen


def test_the_default_is_decided_once(table, monkeypatch):
    record(triton=True)
    assert dispatch._default_implementation("an_op", DEVICE)() == "triton"
    monkeypatch.setattr(proven, "_read", lambda: pytest.fail("read again"))
    assert dispatch._default_implementation("an_op", DEVICE)() == "triton"


def test_an_op_without_kernels_keeps_the_reference(table):
    record(triton=True)
    del table["triton"], table["cuda"]
    assert dispatch.default_on("an_op", DEVICE) == "reference"


def test_doctor_shows_what_is_proven(monkeypatch):
    from specdec_kernels.cli import doctor

    record(triton=True, cuda=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor.selftest, "run", lambda: [])
    report = doctor.examine()
    assert report["proven"] == {"cuda:0 a GPU": {"an_op": ["cuda", "triton"]}}
    assert "proven     cuda:0 a GPU: an_op: cuda, triton" in doctor._lines(report)
