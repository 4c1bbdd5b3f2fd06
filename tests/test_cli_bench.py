"""`specdec bench`: the sweep, what a stopped one goes on from, and its report."""

import json
import re

import pytest
import torch
from tiny_checkpoint import tiny_checkpoint

from specdec_kernels import planner
from specdec_kernels.cli import bench, main, runs
from specdec_kernels.cli.bench import contestants, report, sweep, workloads

QUICK = (
    "--concurrency", "1", "2", "--max-new-tokens", "12", "--repeats", "2", "--dtype", "fp32",
    "--no-compile", "--workload", "edit", "--sampling", "greedy",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    texts = ("a=1; a=1; a=1;", "b b b b", "xyxyxyxy")
    file.write_text("".join(json.dumps({"prompt": t, "workload": "edit"}) + "\n" for t in texts))
    return str(file)


@pytest.fixture
def run(checkpoint, prompts, tmp_path, capsys):
    def run(*argv, out="out"):
        fixed = ("--model", checkpoint, "--prompts", prompts, "--out", str(tmp_path / out))
        code = main(["bench", *fixed, *argv])
        return code, *capsys.readouterr()

    run.out = tmp_path / "out"
    return run


def records_of(folder):
    first, *lines = (folder / "records.jsonl").read_text().splitlines()
    return json.loads(first)["settings"], [json.loads(line) for line in lines]


def test_a_sweep_writes_every_run_and_the_report(run):
    code, text, _ = run(*QUICK)
    assert code == 0
    settings, records = records_of(run.out)
    assert settings["max_new_tokens"] == 12 and settings["dtype"] == "fp32"
    methods = {"plain", "prompt_lookup", "ngram", "suffix"}
    for rows in (1, 2):
        here = [r for r in records if r["concurrency"] == rows]
        names = methods - {"prompt_lookup"} if rows > 1 else methods
        assert {(r["method"], r["repeat"]) for r in here} >= {(n, i) for n in names for i in (0, 1)}
        assert all(r["new_tokens"] == 12 * rows for r in here)
    for r in records:
        assert r["tokens_per_second"] == pytest.approx(r["new_tokens"] / r["seconds"])
        assert r["time_per_output_token"] == pytest.approx(r["seconds"] / 12)
        assert (r["metrics"] is None) == (r["method"] not in ("ngram", "suffix"))
    assert "prompt_lookup" not in {r["method"] for r in records if r["concurrency"] > 1}
    table = (run.out / "table.md").read_text()
    assert table.splitlines()[0].startswith("| work ") and table.split("\n\n")[0] in text
    page = (run.out / "report.html").read_text()
    assert not re.search(r"(src|href)=\"?(?!data:)", page) and "http" not in page
    assert page.count("<tr") == 1 + len(report.rows(records))


def test_a_stopped_sweep_goes_on(run, monkeypatch):
    calls = []
    original = bench.record_of

    def stopping(*args):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(bench, "record_of", stopping)
    assert run(*QUICK)[0] == 130
    before = records_of(run.out)[1]
    assert len(before) == 3
    with open(run.out / "records.jsonl", "a") as file:
        file.write('{"workload": "ed')  # a kill in the middle of a line
    monkeypatch.setattr(bench, "record_of", original)
    assert run(*QUICK)[0] == 0
    after = records_of(run.out)[1]
    assert after[:3] == before
    keys = [tuple(r[name] for name in sweep.KEY) for r in after]
    assert len(set(keys)) == len(keys) > 3
    assert run(*QUICK)[0] == 0
    assert records_of(run.out)[1] == after


def test_other_settings_need_another_folder(run):
    assert run(*QUICK, "--method", "ngram", "--repeats", "1")[0] == 0
    code, _, err = run(*QUICK, "--max-new-tokens", "13")
    assert code == 2 and "max_new_tokens: 12, now 13" in err and "give --out another" in err


def test_both_samplings_and_options_of_a_method(run):
    method = "ngram:prompt_lookup_matches=1,num_speculative_tokens=3"
    options = ("--sampling", "sampled", "--repeats", "1", "--concurrency", "2")
    assert run(*QUICK, *options, "--method", method)[0] == 0
    records = records_of(run.out)[1]
    assert {(r["sampling"], r["method"]) for r in records} >= {
        ("sampled", method), ("greedy", method), ("sampled", "plain")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--workload", "paint"], "--workload: expected one of edit, got 'paint'"),
        (["--method", "ngram:four"], "expected KEY=VALUE behind ngram:"),
        (["--method", "guess"], "method: expected one of ngram"),
        (["--prompts", "nowhere"], "cannot read nowhere"),
        (["--assistant", "no/such/model"], "give --assistant an existing folder"),
    ],
)
def test_mistakes_are_told_in_a_line(run, argv, message):
    code, out, err = run(*argv)
    assert code == 2 and message in err.splitlines()[-1] and out == ""


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", '{"prompt": 3}', '{"text": "a"}', '{"prompt": " "}']
)
def test_a_wrong_line_of_prompts_is_named(tmp_path, line):
    file = tmp_path / "p"
    file.write_text('{"prompt": "fine"}\n\n' + line)
    with pytest.raises(bench.CliError, match="line 3: expected"):
        workloads.read_prompts(file)


def test_our_prompts():
    found = workloads.read_prompts(workloads.OURS)
    assert list(found) == ["edit", "quote", "write"]
    assert all(len(set(texts)) == len(texts) == 20 for texts in found.values())
    assert len(workloads.rows_of(found["edit"], 50)) == 50


def test_padded_rows(checkpoint):
    from transformers import AutoTokenizer

    inputs = bench.encode(AutoTokenizer.from_pretrained(checkpoint), ["abc", "a"])
    assert inputs["input_ids"].shape == (2, 5)
    assert inputs["attention_mask"].tolist() == [[1] * 5, [0, 0, 1, 1, 1]]


# ---- the report


def run_of(method, seconds, metrics=None, repeat=0, tokens=100):
    return {
        "workload": "edit", "sampling": "greedy", "concurrency": 1, "repeat": repeat,
        "method": method, "new_tokens": tokens, "seconds": seconds,
        "time_per_output_token": seconds / tokens, "tokens_per_second": tokens / seconds,
        "acceptance_rate": metrics and metrics["acceptance_rate"],
        "mean_acceptance_length": metrics and metrics["mean_acceptance_length"],
        "metrics": metrics,
    }  # fmt: skip


def counts(a=0.7, k=4, steps=1000, step=0.01, slot=0.1, draft=0.15, prefill=0.0):
    """As if every step had drafted k tokens that were right with chance a."""
    tokens = planner.expected_tokens(a, k)
    return {
        "num_drafts": steps, "num_row_steps": steps, "num_steps": steps,
        "num_draft_tokens": k * steps, "num_accepted_tokens": (tokens - 1) * steps,
        "acceptance_rate": (tokens - 1) / k, "mean_acceptance_length": tokens,
        "seconds": {
            "prefill": prefill,
            "verify": steps * step * (1 + k * slot),
            "draft": steps * step * k * draft,
        },
    }  # fmt: skip


def test_the_prediction_is_the_planners():
    found = counts()
    run, plain = run_of("ngram", 1.0, found), run_of("plain", 1.0)
    assert plain["time_per_output_token"] == 0.01
    expected = planner.plan(0.7, 4, 0.15, 0.1).speedup
    assert report.predicted(run, plain) == pytest.approx(expected, rel=1e-6)
    assert report.predicted(plain, plain) is None
    slow = run_of("plain", 3.0)  # two seconds of them read the prompt, which drafts cannot shorten
    after = report.predicted(run_of("ngram", 1.0, counts(prefill=2.0)), slow)
    assert after == pytest.approx(3.0 / (2.0 + 1.0 / expected), rel=1e-6)
    nothing = {**found, "num_draft_tokens": 0, "num_drafts": 0}
    assert report.predicted(run_of("ngram", 1.0, nothing), plain) == 1.0


def test_speedups_pair_the_runs_of_a_repeat():
    records = [
        *(run_of("plain", s, repeat=i) for i, s in enumerate((1.0, 2.0, 4.0))),
        *(run_of("ngram", s, counts(), repeat=i) for i, s in enumerate((0.5, 2.5, 1.0))),
    ]
    plain, ours = report.rows(records)
    assert plain.speedup == 1.0
    assert ours.speedup == pytest.approx(2.0)  # the median of 2, 0.8 and 4
    assert ours.tokens_per_second == pytest.approx(100.0)
    assert report.losses([plain, ours], ["ngram"]) == []
    slower = report.rows([run_of("plain", 1.0), run_of("ngram", 1.5, counts())])
    assert [row.method for row in report.losses(slower, ["ngram"])] == ["ngram"]
    assert "class=lost" in report.page(slower, {}, {"model": "<tiny>"})
    assert "&lt;tiny&gt;" in report.page(slower, {"a": b"png"}, {"model": "<tiny>"})


def test_pictures():
    pytest.importorskip("matplotlib")
    found = report.rows([run_of("plain", 1.0), run_of("ngram", 0.5, counts())])
    pictures = report.plots(found)
    assert set(pictures) == {"speedup", "predicted"}
    assert all(png.startswith(b"\x89PNG") for png in pictures.values())


# ---- the contestants


def test_texts_are_equally_long_and_the_weights_shared(checkpoint):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    inputs = {"input_ids": torch.tensor([[5, 6, 5, 6, 5]])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    methods = {"ngram": {"method": "ngram"}}
    with contestants.assemble(model, methods, model, compiled=False) as everyone:
        names = [c.name for c in everyone]
        assert names[:3] == ["plain", "prompt_lookup", "assisted"] and names[-1] == "ngram"
        texts = {c.name: c.run(inputs, 30, False).tokens for c in everyone}
        assert all(text == texts["plain"] and len(text[0]) == 30 for text in texts.values())
        sampled = [c.run(inputs, 30, True).tokens for c in everyone if c.name in ("plain", "ngram")]
        assert all(len(text[0]) == 30 for text in sampled)
    copy = runs.share_weights(model)
    assert copy.lm_head.weight is model.lm_head.weight and copy is not model
