"""`specdec doctor --draft` with DFlash drafters: hidden states one layer off are found out."""

import json

import pytest
import torch
from dflash_blocks import block_weights, deepspec, speculators
from test_dflash_text import copying, cyclic
from test_doctor_draft import PROMPT, report_of, run, status
from tiny import char_tokenizer, fresh

SIZE, TOKEN, NOISE, MARKS = 32, 16, slice(24, 28), 28
LOUD = 300.0


@pytest.fixture(scope="module")
def target():
    """Each layer leaves its mark in the hidden states."""
    model = cyclic(fresh("llama", num_hidden_layers=4, mlp_bias=True), used=TOKEN)
    for j, layer in enumerate(model.model.layers):
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            linear.bias.data[:] = 0
        layer.mlp.down_proj.bias.data[MARKS + j] = 1
    model.lm_head.weight.data[:, NOISE] = torch.randn(
        len(model.lm_head.weight), 4, generator=torch.Generator().manual_seed(0)
    )
    return model


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    target.save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return path


def picky(target, folder, ids):
    """Right with the output of layer 2, where three marks stand; its neighbours are loud noise."""
    fc = torch.zeros(SIZE, SIZE)
    fc[:TOKEN, :TOKEN] = torch.eye(TOKEN)
    for mark, factor in ((0, LOUD), (2, -LOUD), (3, LOUD)):
        fc[NOISE, MARKS + mark] = factor
    return copying(target, folder, ids, fc)


def test_a_drafter_that_is_read_rightly(capsys, target, folder, tmp_path):
    source = picky(target, tmp_path, (3,))
    code, report = report_of(capsys, "--draft", source, "--target", folder)
    assert code == 0 and report["passed"] and report["best"] == "as loaded"
    assert report["kind"] == "dflash" and report["checkpoint"]["layout"] == "z-lab or DeepSpec"
    assert report["checkpoint"]["block_size"] == 8 and status(report)["mask"] == "ok"
    rows = {row["convention"]: row["tokens_per_forward"] for row in report["conventions"]}
    assert rows.keys() == {"as loaded", "ids -1", "ids +1"}
    assert rows["as loaded"] > 2 > 1.5 > rows["ids -1"] and rows["ids +1"] < 1.5


@pytest.mark.parametrize("ids, best", [((2,), "ids +1"), ((4,), "ids -1")])
def test_a_drafter_that_is_read_wrongly(ids, best, capsys, target, folder, tmp_path):
    """The change that the doctor names makes the next examination pass."""
    source = picky(target, tmp_path, ids)
    code, report = report_of(capsys, "--draft", source, "--target", folder)
    assert code == 1 and status(report)["convention"] == "error" and report["best"] == best
    name = "dflash_config.target_layer_ids"
    assert report["remedy"] == {"config": {name: [2]}, "complete": True}
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["target_layer_ids"] = [2]
    path.write_text(json.dumps(config))
    code, report = report_of(capsys, "--draft", source, "--target", folder)
    assert code == 0 and report["best"] == "as loaded"


def test_speculators_and_what_cannot_be_loaded(capsys, target, folder, tmp_path):
    weights = block_weights(target, ids=(0, 2, 4), drafted=30)
    sliding = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=9)
    source = speculators(tmp_path, target, weights, (0, 2, 4), sliding)
    code, out, _ = run(capsys, "--draft", source, "--target", folder, *PROMPT)
    assert code == 0 and "dflash, layout speculators, num layers 2" in out
    assert "layer 0: a window of 9, causal; layer 1: all" in out
    assert "30 of 96 tokens (31%), d2t maps to" in out and "borrowed: embed_tokens" in out
    assert "aux_hidden_state_layer_ids [0, 2, 4], read as inputs" in out
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    code, out, _ = run(capsys, "--draft", source, "--target", folder, *PROMPT)
    assert code == 1 and "error    load: expected the mask among the target's tokens" in out


def test_dspark(capsys, target, folder, tmp_path):
    weights = block_weights(target, ids=(1, 2, 3), rank=4, confidence="both")
    source = deepspec(tmp_path, target, weights, (1, 2, 3))
    code, report = report_of(capsys, "--draft", source, "--target", folder)
    assert code == 0 and report["kind"] == "dspark" and report["passed"]
    assert [row["hidden_layers"] for row in report["conventions"]] == [
        [1, 2, 3], [0, 1, 2], [2, 3, 4]
    ]  # fmt: skip
