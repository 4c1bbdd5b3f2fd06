"""The benchmark harness: what it checks, rotates, records and prints. Nothing asserts a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))  # the folder bench/ is not installed

from bench import __main__ as cli
from bench import harness, report, windows
from bench.harness import Case, WrongResult
from bench.roofs import Roofs
from specdec_kernels import native

pytestmark = pytest.mark.skipif(native.cpu is None, reason="no CPU kernels to measure")

ROOFS = Roofs(1, 10.0, {"fp32": 100.0, "bf16": 200.0}, "bf16 dot")
KEYS = {
    "op", "case", "backend", "threads", "ms", "p10", "p90", "bytes", "roof_ms", "rivals", "machine"
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def double(x):
    return x * 2


def make_case(**changes) -> Case:
    fields = {
        "shape": {"T": 3, "dtype": "fp32"},
        "make": lambda seed: torch.arange(4.0) + seed,
        "run": double,
        "reference": double,
        "bytes": 32,
        "rivals": {"torch_batched": lambda x: x + x},
    }
    return Case(**{**fields, **changes})


def make_record(ms=1.0, shape=None, op="an_op", **rivals) -> dict:
    return {
        "op": op, "case": shape or {"T": 1, "dtype": "fp32"}, "backend": "cpu", "threads": 1,
        "ms": ms, "p10": ms, "p90": ms, "bytes": 2_000_000, "roof_ms": 0.25, "rivals": rivals,
        "machine": {"cpu": "a CPU"},
    }  # fmt: skip


# ---- records


def test_a_record_has_exactly_these_keys():
    (record,) = harness.measure("an_op", make_case(flops=4000), ROOFS, seconds=0.0)
    assert set(record) == KEYS
    assert json.loads(json.dumps(record)) == record
    assert record["case"] == {"T": 3, "dtype": "fp32"} and record["op"] == "an_op"
    assert (record["backend"], record["threads"]) == ("cpu", 1)
    assert 0 < record["p10"] <= record["ms"] <= record["p90"]
    assert list(record["rivals"]) == ["torch_batched"] and record["rivals"]["torch_batched"] > 0
    assert record["bytes"] == 32 and record["roof_ms"] == ROOFS.ms(32, 4000, "fp32")


def test_what_came_out_joins_the_case_but_not_its_name():
    case = make_case(facts=lambda results: {"rows_visited": len(results)}, vary=True)
    (record,) = harness.measure("an_op", case, ROOFS, seconds=0.0)
    assert record["case"]["rows_visited"] > 1
    assert harness.label(record["case"]) == "T=3 fp32"
    assert f"rows visited {record['case']['rows_visited']}" in report.row(record)


def test_rivals_have_agreed_names():
    with pytest.raises(ValueError, match="expected rivals among sdpa_bool"):
        make_case(rivals={"somebody": double})


# ---- checks come first


def never(*args):
    raise AssertionError("timed")


def test_a_wrong_kernel_fails_before_anything_is_timed(monkeypatch):
    monkeypatch.setattr(harness, "time_in_turns", never)
    wrong = make_case(run=lambda x: x * 2 + (x == 3))
    with pytest.raises(WrongResult, match="an_op, T=3 fp32: cpu is wrong"):
        harness.measure("an_op", wrong, ROOFS, seconds=0.0)
    wrong = make_case(rivals={"flex": lambda x: x})
    with pytest.raises(WrongResult, match="flex is wrong"):
        harness.measure("an_op", wrong, ROOFS, seconds=0.0)


def test_rivals_that_draw_are_checked_against_the_inputs(monkeypatch):
    monkeypatch.setattr(harness, "time_in_turns", never)

    def check(got, expected, inputs):
        assert got in inputs, "drew nothing of the set"

    case = make_case(rivals={"torch_batched": lambda x: torch.tensor(9.0)}, check_rival=check)
    with pytest.raises(WrongResult, match="torch_batched is wrong: drew nothing of the set"):
        harness.measure("an_op", case, ROOFS, seconds=0.0)


def test_checks_of_an_op_in_place_start_from_fresh_inputs():
    case = make_case(run=lambda x: x.mul_(2), rivals={}, in_place=True)
    harness.check("an_op", case, {"cpu": case.run, "again": case.run}, case.make(0))


# ---- rotation


def test_sets_exceed_the_last_level_cache_within_memory(monkeypatch):
    monkeypatch.setattr(harness, "last_level_cache", lambda: 1 << 20)
    assert harness.number_of_sets(touched=1 << 20, held=1 << 20) == 2
    assert harness.number_of_sets(touched=10_000, held=10_000) == 210
    assert harness.number_of_sets(touched=4 << 20, held=4 << 20) == 1
    assert harness.number_of_sets(touched=1, held=1) == harness.MAX_SETS
    assert harness.number_of_sets(touched=1000, held=harness.MAX_SET_BYTES // 3) == 3


def test_sets_are_copies_or_have_seeds_of_their_own(monkeypatch):
    monkeypatch.setattr(harness, "number_of_sets", lambda touched, held: 3)
    view = torch.arange(6.0).view(2, 3).T

    def make(seed):
        return windows.Window(view + seed, *[None] * 3, [view], {"a": view}, "text")

    sets = harness.input_sets(make_case(make=make), make(0))
    assert [x.logits.equal(view) for x in sets] == [True] * 3
    assert sets[2].logits.stride() == view.stride()
    assert len({x.logits.data_ptr() for x in sets}) == 3
    assert sets[1].draft_logits["a"] is not sets[2].draft_logits["a"]
    sets = harness.input_sets(make_case(make=make, vary=True), make(0))
    assert [x.logits.equal(view + i) for i, x in enumerate(sets)] == [True] * 3


def test_everyone_has_one_sample_a_round_and_the_sets_take_turns():
    calls = []
    contenders = {name: lambda x, name=name: calls.append((name, x)) for name in ("a", "b")}
    times = harness.time_in_turns(contenders, [0, 1, 2], seconds=0.0, shortest=0.0)
    assert [len(t) for t in times.values()] == [3, 3]
    assert [x for _, x in calls] == [i % 3 for i in range(len(calls))]
    assert [name for name, _ in calls[-6:]] == ["a", "b", "b", "a", "a", "b"]


def test_short_calls_are_repeated():
    calls = []
    harness.time_in_turns({"a": calls.append}, [0], seconds=0.0, shortest=1e-4)
    assert len(calls) > 1 + 3 + 3, "one call a sample"


# ---- reports


def test_a_row_shows_bandwidth_roof_and_ratio():
    row = report.row(make_record(0.5, {"T": 4, "ctx": 50, "dtype": "bf16"}, flex=1.0))
    assert "T=4 ctx=50 bf16: cpu 0.5 ms" in row
    assert "2 MB, 4.0 GB/s, 50% of the roof" in row
    assert "flex 1 (2.00x)" in row


def test_the_operands_are_read_by_the_probe_too():
    case = make_case(rivals={}, reads=lambda x: [x.view(2, 2)])
    (record,) = harness.measure("an_op", case, ROOFS, seconds=0.0)
    assert set(record) == KEYS | {"read_ms"} and record["read_ms"] > 0
    assert "2.50x the read" in report.row(make_record(0.5) | {"read_ms": 0.2})
    assert "the read" not in report.row(make_record(0.5))


def test_the_share_of_the_arithmetic_roof():
    case = make_case(rivals={}, operations=lambda shape: 1000 * shape["T"])
    (record,) = harness.measure("an_op", case, ROOFS, seconds=0.0)
    assert set(record) == KEYS | {"arithmetic_ms"}
    assert record["arithmetic_ms"] == pytest.approx(2 * 3000 / ROOFS.gflops["fp32"] / 1e6)
    row = report.row(make_record(0.5) | {"arithmetic_ms": 0.1})
    assert "50% of the roof, 20% of the arithmetic roof" in row
    assert "arithmetic" not in report.row(make_record(0.5))


def test_the_summary_lists_best_worst_and_every_loss():
    records = [
        make_record(1.0, {"T": 1, "dtype": "bf16"}, flex=4.0, hf_sdpa=0.97),
        make_record(1.0, {"T": 8, "dtype": "bf16"}, flex=0.5, hf_sdpa=2.0),
    ]
    text = report.summary(records)
    assert "mean  1.41x of 2, best 4.00x (T=1 bf16), worst 0.50x (T=8 bf16)" in text
    assert "1 of 4 comparisons" in text
    assert "  an_op T=8 bf16: 0.50x against flex" in text
    assert text.count("against") == 1
    assert "we lose nowhere" in report.summary(records[:1])
    assert report.summary([]) == "nothing was measured"


# ---- command line


@pytest.fixture
def quiet_machine(monkeypatch):
    monkeypatch.setattr(cli, "measure_roofs", lambda threads: ROOFS)


def run_with(monkeypatch, measure, *args: str) -> int:
    monkeypatch.setattr(cli, "measure", measure)
    return cli.main(["commit_kv", "--quick", *args])


def test_all_records_are_written_and_summed_up(monkeypatch, quiet_machine, capsys, tmp_path):
    file = tmp_path / "out.json"

    def measure(op, case, roofs, seconds):
        return [make_record(op=op, index_copy=2.0)]

    assert run_with(monkeypatch, measure, "--json", str(file)) == 0
    out = capsys.readouterr().out
    assert "transformers" in out and "roofs of 1 threads" in out and "commit_kv: 2 cases" in out
    assert "best 2.00x" in out and "we lose nowhere" in out
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [set(line) for line in lines] == [KEYS] * 2


def interrupted_by(error):
    answers = iter([[make_record(index_copy=0.5)]])

    def measure(op, case, roofs, seconds):
        for answer in answers:
            return answer
        raise error

    return measure


@pytest.mark.parametrize(
    "error, code, where, text",
    [
        (KeyboardInterrupt(), 130, "out", "stopped; what there is"),
        (WrongResult("an_op, T=1: cpu is wrong: off by one"), 1, "err", "off by one"),
    ],
)
def test_a_run_that_ends_early_prints_what_there_is(
    monkeypatch, quiet_machine, capsys, tmp_path, error, code, where, text
):
    file = tmp_path / "out.json"
    assert run_with(monkeypatch, interrupted_by(error), "--json", str(file)) == code
    captured = capsys.readouterr()
    assert text in getattr(captured, where)
    assert "0.50x against index_copy" in captured.out
    assert len(file.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "args, message",
    [
        (["commit"], "no benchmark commit; there are build_tree, commit_kv"),
        (["--threads", "0"], "--threads: expected 1 to "),
        (["--threads", "100000"], "--threads: expected 1 to "),
        (["--threads", "two"], "invalid int value: 'two'"),
        (["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
    ],
)
def test_mistakes_are_named(args, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_the_list_names_a_benchmark_for_every_op(capsys):
    assert cli.main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    ops = Path(cli.__file__).parents[1] / "specdec_kernels" / "ops"
    assert set(names) >= {p.parent.name for p in ops.glob("*/reference.py")}
