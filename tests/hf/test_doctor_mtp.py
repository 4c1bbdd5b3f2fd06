"""`specdec doctor --draft` on MTP layers: read rightly, read in the wrong order, in a model."""

import shutil

import pytest
import torch
from mtp_layers import FamilyMtp
from safetensors.torch import load_file, save_file
from test_doctor_draft import report_of, run, status
from test_mtp_families import made
from test_mtp_text import prophet
from tiny import char_tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a target and of layers that say the same."""
    folder = tmp_path_factory.mktemp("pair")
    target, source = prophet(folder / "layers", "token", 2)
    target.save_pretrained(folder / "target")
    char_tokenizer().save_pretrained(folder / "target")
    return folder / "target", source


def test_layers_that_are_read_rightly(pair, capsys):
    target, source = pair
    code, report = report_of(capsys, "--draft", source, "--target", target)
    assert code == 0 and report["kind"] == "mtp" and report["best"] == "as loaded"
    assert report["checkpoint"]["num_layers"] == 2 and "error" not in status(report).values()
    rows = {row["convention"]: row for row in report["conventions"]}
    assert rows.keys() == {"as loaded", "before the final norm", "hidden_first true"}
    assert rows["as loaded"]["hidden_layers"] == [2] and not rows["as loaded"]["hidden_first"]
    assert rows["as loaded"]["tokens_per_forward"] > 3
    assert rows["hidden_first true"]["hidden_first"]
    assert rows["hidden_first true"]["tokens_per_forward"] < 1.5
    code, out, _ = run(capsys, "--draft", source, "--target", target, "--prompt", "hello, world")
    assert code == 0 and "mtp, architecture LlamaModel, num layers 2" in out


def test_layers_that_want_the_hidden_state_first(pair, capsys, tmp_path):
    """No setting asks for that: the layout decides."""
    target, source = pair
    weights = load_file(f"{source}/model.safetensors")
    for name in [n for n in weights if n.endswith("input_proj.weight")]:
        weights[name] = torch.cat(weights[name].chunk(2, 1)[::-1], 1).contiguous()
    shutil.copy(f"{source}/config.json", tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    code, report = report_of(capsys, "--draft", tmp_path, "--target", target)
    assert code == 1 and report["best"] == "hidden_first true"
    assert report["remedy"] == {"config": {}, "complete": False}
    assert status(report)["convention"] == "error"


def test_the_targets_own_layers(capsys, tmp_path):
    dense, _ = made("qwen2", tmp_path)
    assert isinstance(dense, FamilyMtp)
    char_tokenizer().save_pretrained(tmp_path)
    code, report = report_of(capsys, "--draft", tmp_path, "--target", tmp_path)
    assert code == 0 and report["kind"] == "mtp"
    assert {row["hidden_first"] for row in report["conventions"]} == {True, False}
