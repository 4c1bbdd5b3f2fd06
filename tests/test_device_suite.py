"""The suite for GPUs on a CPU: a double in place of the device, kernels that are made up."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # the folder bench/ is not installed

from host_device import HostDevice

from bench import __main__ as cli
from bench import (
    bench_verify_greedy,
    device_checks,
    device_rivals,
    device_tests,
    suite,
    windows,
)
from bench.device_tests import Finding
from bench.harness import Case
from specdec_kernels import dispatch, native, proven

OP = "verify_greedy"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def right(logits, ids, parents, num_nodes):
    """verify_greedy of chains without padding, and without a look from the host."""
    best = logits.argmax(-1)
    accepted = (ids[:, 1:] == best[:, :-1]).long().cumprod(1).sum(1)
    slots = torch.arange(ids.shape[1])
    kept = slots <= accepted[:, None]
    path = torch.where(kept, slots, -1).int()
    return path, accepted.int(), torch.where(kept, best, -1), torch.zeros_like(num_nodes)


def wrong(*args):
    path, accepted, tokens, status = right(*args)
    return path, accepted, tokens + 1, status


def looking(*args):
    assert args[3].max().item() > 0
    return right(*args)


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """Puts a function in place of the op's Triton kernel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "triton_error", None)
    monkeypatch.setattr(native, "triton_interprets", True)
    monkeypatch.setattr(native, "cuda_error", "not built")

    def put(function):
        table = {"reference": dispatch.IMPLEMENTATIONS[OP]["reference"], "triton": function}
        for backend in list(dispatch.IMPLEMENTATIONS[OP]):
            if backend not in table:
                monkeypatch.delitem(dispatch.IMPLEMENTATIONS[OP], backend)
        monkeypatch.setitem(dispatch.IMPLEMENTATIONS[OP], "triton", function)

    return put


def small_cases(options=None):
    for batch, width, vocab in ((2, 4, 111), (1, 6, 300)):
        shape = {"B": batch, "T": width, "V": vocab, "dtype": "fp32"}
        yield Case(
            shape=shape,
            make=partial(windows.make, shape=shape),
            run=bench_verify_greedy.ours,
            reference=bench_verify_greedy.by_reference,
            rivals={
                "torch_argmax": device_rivals.torch_argmax,
                "torch_softmax": NotRecorded(),
                "sgl_kernel": no_such_rival,
            },
            bytes=windows.logits_bytes(shape),
            check_rival=bench_verify_greedy.same_tokens,
        )


class NotRecorded:
    """Runs, but not when it is recorded."""

    def __call__(self, x):
        if sys._getframe(2).f_code.co_name == "__init__":
            raise RuntimeError("cannot be recorded")


def no_such_rival(x):
    raise ImportError("another version")


# ---- checks


def errors_of(function, kernel):
    kernel(function)
    found = device_checks.check_cases(HostDevice(), OP, "triton", small_cases())
    assert [f.check for f in found] == ["result", "graph", "no sync"]
    return [f.error for f in found]


def test_a_right_kernel_passes(kernel):
    assert errors_of(right, kernel) == [None, None, None]


def test_a_wrong_kernel_is_told_with_the_shape(kernel):
    result, graph, sync = errors_of(wrong, kernel)
    assert result.startswith("B=2 T=4 V=111 fp32: AssertionError: ")
    assert graph is None and sync is None


class Frozen:
    """Replays what it computed when it was recorded."""

    def __init__(self, run):
        self.run, self.results = run, []

    def __call__(self, inputs):
        self.results.append(self.run(inputs))
        return self.results[-1] if len(self.results) <= 3 else self.results[1]


def test_a_recording_that_does_not_read_its_inputs_is_caught():
    case, device = next(small_cases()), HostDevice()
    run = device_checks.on_path("reference", case.run)
    device_checks.replays(device, case, run)
    with pytest.raises(AssertionError):
        device_checks.replays(device, case, Frozen(run))


def test_a_kernel_that_waits_is_caught(kernel):
    result, graph, sync = errors_of(looking, kernel)
    assert result is None and graph is None
    assert "RuntimeError: called a synchronizing operation" in sync
    assert torch.ones(1).item() == 1.0  # the guard is gone


# ---- the whole


@pytest.fixture
def whole(monkeypatch, kernel):
    """The suite on the double: made-up kernels, small shapes, no subprocesses."""
    monkeypatch.setattr(suite, "CudaDevice", lambda name: HostDevice())
    monkeypatch.setattr(suite, "MEASURED", {OP: small_cases})
    monkeypatch.setattr(suite, "checked", lambda op: list(small_cases()))
    monkeypatch.setattr(
        device_tests,
        "run_all",
        lambda pairs, device, quick: [Finding(*p, "tests", None, "3 passed") for p in pairs],
    )
    recorded = []
    monkeypatch.setattr(proven, "record", lambda results, device: recorded.append(results))
    return recorded


def test_a_run_records_writes_and_prints(whole, kernel, capsys, tmp_path):
    kernel(right)
    files = tmp_path / "out.json", tmp_path / "out.md"
    args = ["--device", "cuda", "--suite"]
    code = cli.main([*args, "--json", str(files[0]), "--markdown", str(files[1])])
    assert code == 0
    assert whole == [{(OP, "triton"): True}]
    out = capsys.readouterr().out
    assert "ok   verify_greedy triton" in out and "3 passed" in out
    assert ("sgl_kernel failed" in out and "where we lose:\n" in out) or "we lose nowhere" in out
    facts, *lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert facts["facts"]["device"] == "no GPU"
    assert [line["check"] for line in lines[:4]] == ["tests", "result", "graph", "no sync"]
    assert {"ms", "p10", "p90", "gb_per_s", "of_copy", "rivals"} <= lines[4].keys()
    assert lines[4]["rivals"]["sgl_kernel"] == "ImportError: another version"
    assert lines[4]["eager"] == ["torch_softmax"] and "(eager)" in out
    page = files[1].read_text()
    assert page.startswith("# Benchmarks: no GPU") and "driver 1.2" in page
    assert "| verify_greedy | triton | graph | passed: 2 shapes |" in page
    assert "| verify_greedy | B=2 T=4 V=111 fp32 | triton |" in page


def test_a_quick_run_proves_nothing_but_failures(whole, kernel):
    kernel(right)
    assert cli.main(["--device", "cuda", "--suite", "--quick"]) == 0
    kernel(wrong)
    assert cli.main(["--device", "cuda", "--suite", "--quick"]) == 1
    assert whole == [{}, {(OP, "triton"): False}]


def test_what_fails_its_tests_is_not_run_here(whole, kernel, monkeypatch, capsys):
    kernel(lambda *args: pytest.fail("ran"))
    failed = Finding(OP, "triton", "tests", "1 failed")
    monkeypatch.setattr(device_tests, "run_all", lambda *args: [failed])
    assert cli.main(["--device", "cuda", "--suite"]) == 1
    assert whole == [{(OP, "triton"): False}]


def test_a_case_that_cannot_be_made_is_reported_and_the_rest_goes_on(
    whole, kernel, monkeypatch, capsys
):
    kernel(right)

    def cases(options):
        first, second = small_cases()
        yield Case(**{**first.__dict__, "make": lambda seed: [][seed]})
        yield second

    monkeypatch.setattr(suite, "MEASURED", {OP: cases})
    assert cli.main(["--device", "cuda", "--suite"]) == 1
    out = capsys.readouterr().out
    assert "B=2 T=4 V=111 fp32: triton FAIL IndexError: list index out of range" in out
    assert "B=1 T=6 V=300 fp32: triton " in out and "µs" in out


def test_a_record_that_cannot_be_kept_is_said(whole, kernel, monkeypatch, capsys):
    def refuse(results, device):
        raise PermissionError("read-only")

    kernel(right)
    monkeypatch.setattr(proven, "record", refuse)
    assert cli.main(["--device", "cuda", "--suite"]) == 0
    assert "what is proven cannot be kept: read-only" in capsys.readouterr().err


def test_a_failed_check_ends_in_exit_code_1_and_is_not_timed(whole, kernel, capsys):
    kernel(wrong)
    assert cli.main(["--device", "cuda", "--suite"]) == 1
    assert whole == [{(OP, "triton"): False}]
    out = capsys.readouterr().out
    assert "FAIL verify_greedy triton" in out and "µs" not in out


def test_without_a_gpu_there_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["--device", "cuda", "--suite"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "bench: --suite needs a CUDA device: torch sees no CUDA device\n"


@pytest.mark.parametrize(
    "args, message",
    [
        (["--suite", "attention"], "no op attention; there are tree_attention"),
        (["--suite", "--device", "tpu"], "--device: expected cuda or cuda:N, got tpu"),
    ],
)
def test_mistakes_are_named(args, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_further_paths_of_an_implementation_are_run_where_they_exist(monkeypatch, kernel):
    function = lambda *args: None  # noqa: E731
    function.paths = ("triton", "cuda-hopper")
    kernel(function)
    device = HostDevice()
    assert list(suite.pairs(device, [OP])) == [(OP, "triton"), (OP, "cuda-hopper")]
    monkeypatch.setattr(device, "capability", (8, 0), raising=False)
    assert list(suite.pairs(device, [OP])) == [(OP, "triton")]


def test_the_tried_path_counts_as_proven_inside_only():
    device = torch.device("cpu")
    run = device_checks.on_path("cuda-hopper", lambda x: seen())

    def seen():
        return proven.is_proven("an_op", "cuda-hopper", device), dispatch.asked_for()

    assert run(None) == (True, "cuda")
    assert device_checks.on_path("cuda", lambda x: seen())(None) == (False, "cuda")
    assert not proven.is_proven("an_op", "cuda-hopper", device)
