"""python -m bench acceptance: its options, table and records, over texts that need no model."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # the folder bench/ is not installed

from bench import __main__ as cli
from bench import acceptance
from specdec_kernels import native
from specdec_kernels.cli.options import method_with_options

pytestmark = pytest.mark.skipif(native.cpu is None, reason=str(native.cpu_error))
PROMPT, OUTPUT = [*range(5, 30), 3, 4], [*range(5, 17), 90, 91, 5, 6, 7, 8]


@pytest.fixture
def two_texts(monkeypatch):
    """In place of the demo's prompts."""

    def known(output):
        return lambda options: acceptance.replayed(options, PROMPT, output, 100)

    workloads = {"copy": known(OUTPUT), "new": known(list(range(40, 60)))}
    monkeypatch.setattr(acceptance, "_prompts", lambda args: workloads)
    return workloads


def test_methods_have_options():
    assert method_with_options("suffix,ngram") == {"method": "suffix,ngram"}
    assert method_with_options("eagle3:model=a/b:c,draft_tree_topk=4,draft_p_min=0.5") == {
        "method": "eagle3", "model": "a/b:c", "draft_tree_topk": 4, "draft_p_min": 0.5,
    }  # fmt: skip
    with pytest.raises(ValueError, match="expected KEY=VALUE behind ngram:, got 'four'"):
        method_with_options("ngram:four")


def test_a_table_and_records(two_texts, tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    arguments = ["--method", "ngram", "--method", "suffix", "--num-speculative-tokens", "6"]
    assert cli.main(["acceptance", *arguments, "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| method | copy | new | geometric mean |" and len(lines) == 4
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["method"], r["prompt"], r["call"]) for r in records] == [
        (method, prompt, call)
        for method in ("ngram", "suffix")
        for prompt in ("copy", "new")
        for call in (1, 2)
    ]
    for r in records:
        assert r["counts"]["num_new_tokens"] == len(OUTPUT if r["prompt"] == "copy" else range(20))
        assert r["same_text"] and r["options"]["num_speculative_tokens"] == "6"
        assert all(0 < share <= 1 for share in r["acceptance_by_position"])
    rates = {(r["method"], r["prompt"], r["call"]): r["tokens_per_forward"] for r in records}
    assert rates["ngram", "copy", 1] > 2 and rates["ngram", "new", 2] == 1
    assert rates["suffix", "new", 2] > 3 > rates["suffix", "new", 1]
    assert f"{rates['suffix', 'new', 1]:.2f}, {rates['suffix', 'new', 2]:.2f}" in lines[3]


def test_another_text_is_an_error(two_texts, monkeypatch, capsys):
    def changing(options):
        output = OUTPUT if options["method"] == "ngram" else OUTPUT[:-1]
        return acceptance.replayed(options, PROMPT, output, 100)

    two_texts["copy"] = changing
    assert acceptance.main(["--method", "ngram", "--method", "suffix"]) == 1
    errors = capsys.readouterr().err
    assert "suffix, copy, call 2: another text" in errors and "new" not in errors


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--method", "nothing"], "method: expected one of ngram, .* got 'nothing'"),
        (["--method", "ngram", "--json", "no/such/folder"], "No such file or directory"),
        (["--method", "medusa:model=x"], "--text: expected methods without a model"),
    ],
)
def test_errors_are_one_line(two_texts, capsys, arguments, message):
    assert acceptance.main(arguments) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("bench acceptance: ")
    assert re.search(message, errors[0])
