"""`specdec doctor --draft`: a head that is read wrongly, and what cannot be read (pain 11)."""

import json
import shutil

import pytest
import torch
from eagle_heads import deepspec, eagle1, head_weights, layer_config, safeailab, speculators
from test_medusa import random_heads
from test_medusa import write as write_medusa
from tiny import VOCAB, char_tokenizer, fresh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from specdec_kernels import cli
from specdec_kernels.cli.draft_conventions import Convention, Measurement
from specdec_kernels.hf.features import BEFORE_NORM

SIZE, LAYERS, IDS = 32, 4, (1, 2, 3)
# Places of a hidden state: what says the token, what tokens leave alone, a mark for every layer.
TOKEN, NOISE, MARKS = slice(0, 16), slice(24, 28), slice(28, 32)
LOUD = 300.0
FLAGS = dict(norm_before_residual=True, norm_output=False)
PROMPT = ["--prompt", "hello, world", "--dtype", "fp32", "--max-new-tokens", "60"]


def marked(share=0.02):
    """A target whose next token hangs on its last one; the marks in a hidden state count layers."""
    target = fresh("llama", num_hidden_layers=LAYERS, mlp_bias=True)
    for j, layer in enumerate(target.model.layers):
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.data *= share
            linear.weight.data[TOKEN.stop :] = 0
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            linear.bias.data[:] = 0
        layer.mlp.down_proj.bias.data[MARKS.start + j] = 1
    target.model.embed_tokens.weight.data[:, TOKEN.stop :] = 0
    target.model.norm.weight.data[:] = 1
    target.lm_head.weight.data[:, MARKS] = 0
    return target


def picky_head(target):
    """An EAGLE-3 head that is right with the hidden states IDS and norm_before_residual alone.

    The token passes through attention, over itself, to the output. Of the middle hidden state the
    marks are read: those of its two layers cancel out, and any others are loud noise. Without
    norm_before_residual the output of the slot before, another token's, comes into it.
    """
    weights = head_weights(target, ids=IDS, size=SIZE, own_embedding=False, own_lm_head=False)
    for weight in weights.values():
        weight[:] = 1 if weight.dim() == 1 else 0
    for place, factor in ((0, LOUD), (1, -LOUD), (2, LOUD)):
        weights["fc.weight"][NOISE, SIZE + MARKS.start + place] = factor
    weights["layers.0.hidden_norm.weight"][:] = 0
    weights["layers.0.hidden_norm.weight"][NOISE] = LOUD
    attention = "layers.0.self_attn."
    weights[attention + "v_proj.weight"][:, TOKEN] = torch.eye(16)
    for start, head in ((0, 0), (8, 2)):  # of four heads, the first of each pair
        out = slice(start, start + 8), slice(8 * head, 8 * head + 8)
        weights[attention + "o_proj.weight"][out] = torch.eye(8)
    return weights


def run(capsys, *argv):
    code = cli.main(["doctor", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def report_of(capsys, *argv):
    code, out, _ = run(capsys, *PROMPT, *argv, "--json")
    return code, json.loads(out)


def status(report):
    return {check["name"]: check["status"] for check in report["checks"]}


@pytest.fixture(scope="module")
def target():
    return marked()


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    target.save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def weights(target):
    return picky_head(target)


def write(path, target, weights, ids, **flags):
    """By speculators, whose ids count inputs of layers; a slot of the head sees itself alone."""
    return speculators(path, target, weights, ids, 1, SIZE, **{**FLAGS, **flags})


def test_a_head_that_is_read_rightly(capsys, target, weights, folder, tmp_path):
    source = write(tmp_path, target, weights, IDS)
    code, report = report_of(capsys, "--draft", source, "--target", folder)
    assert code == 0 and report["passed"] and report["best"] == "as loaded"
    assert report["kind"] == "eagle3" and report["checkpoint"]["layout"] == "speculators"
    assert report["remedy"] is None and "error" not in status(report).values()
    rows = {row["convention"]: row for row in report["conventions"]}
    assert rows.keys() == {
        "as loaded", "ids -1", "ids +1", "norm_before_residual false", "norm_output true"
    }  # fmt: skip
    assert rows["as loaded"]["hidden_layers"] == [1, 2, 3]
    assert rows["as loaded"]["tokens_per_forward"] > 3
    assert rows["ids +1"]["hidden_layers"] == [2, 3, 4]
    assert rows["ids +1"]["tokens_per_forward"] < 1.5
    residual = rows["norm_before_residual false"]
    assert residual["norm_before_residual"] is False
    first, second, third = residual["accepted_per_position"]
    assert first > 0.8 and second < 0.3 and third < 0.3
    assert residual["num_drafts"] > rows["as loaded"]["num_drafts"] > 0


@pytest.mark.parametrize(
    ("ids", "flags", "best", "remedy"),
    [
        ((0, 1, 2), {}, "ids +1", dict(eagle_aux_hidden_state_layer_ids=[1, 2, 3])),
        ((2, 3, 4), {}, "ids -1", dict(eagle_aux_hidden_state_layer_ids=[1, 2, 3])),
        (
            IDS,
            dict(norm_before_residual=False),
            "norm_before_residual true",
            dict(norm_before_residual=True),
        ),
        (
            (0, 1, 2),
            dict(norm_before_residual=False),
            "ids +1, norm_before_residual true",
            dict(eagle_aux_hidden_state_layer_ids=[1, 2, 3], norm_before_residual=True),
        ),
    ],
)
def test_a_head_that_is_read_wrongly(
    ids, flags, best, remedy, capsys, target, weights, folder, tmp_path
):
    """The change that the doctor names makes the next examination pass."""
    source = write(tmp_path, target, weights, ids, **flags)
    code, report = report_of(capsys, "--draft", source, "--target", folder)
    assert code == 1 and not report["passed"] and status(report)["convention"] == "error"
    assert report["best"] == best
    assert report["remedy"] == {"config": remedy, "complete": True}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **remedy}))
    code, report = report_of(capsys, "--draft", source, "--target", folder)
    assert code == 0 and report["best"] == "as loaded"


def test_the_change_is_named_in_the_words_of_the_config(capsys, target, weights, folder, tmp_path):
    """Ids as outputs of layers, with the copy of them that some configs have, are named so."""
    source = write(tmp_path / "outputs", target, weights, (1, 2, 3))
    path = tmp_path / "outputs" / "config.json"
    config = json.loads(path.read_text())
    del config["speculators_model_type"]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    path.write_text(json.dumps(config))
    code, out, _ = run(capsys, "--draft", source, "--target", folder, *PROMPT)
    key = "eagle_config.eagle_aux_hidden_state_layer_ids"
    assert code == 1 and f"in config.json set {key}: [0, 1, 2]" in out
    assert f"2, 3, 4: {key} [1, 2, 3], read as outputs of layers" in out
    assert "best: ids -1" in out and "| ids -1" in out and "says otherwise" not in out


def test_last_states_before_the_final_norm(capsys, folder, target, tmp_path):
    """Heads that were made for them, one that drafts what the target repeats (Medusa)."""
    repeating = marked()
    norm = torch.linspace(-2, 2, SIZE).sign() * torch.linspace(1, 3, SIZE)
    table = repeating.model.embed_tokens.weight.data
    repeating.model.norm.weight.data[:] = norm
    repeating.lm_head.weight.data[:] = table / norm
    repeating.save_pretrained(tmp_path / "target")
    char_tokenizer().save_pretrained(tmp_path / "target")
    heads = {f"{i}.0.weight": table.clone() for i in range(2)}
    source = write_medusa(tmp_path / "heads", heads)
    code, report = report_of(capsys, "--draft", source, "--target", tmp_path / "target")
    assert code == 1 and report["kind"] == "medusa"
    assert report["best"] == "before the final norm"
    assert report["remedy"] == {"config": {}, "complete": False}
    assert [row["hidden_layers"] for row in report["conventions"]] == [[LAYERS], ["before norm"]]
    heads = {name: weight / norm for name, weight in heads.items()}
    source = write_medusa(tmp_path / "heads", heads)
    (source / "config.json").write_text(json.dumps({"medusa_num_heads": 5}))
    code, report = report_of(capsys, "--draft", source, "--target", tmp_path / "target")
    assert code == 0 and report["best"] == "as loaded" and status(report)["heads"] == "warning"


def shortened(folder, name):
    file = folder / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_what_cannot_be_loaded_is_one_line(capsys, target, weights, folder, tmp_path):
    """Exit code 1, and a line that says what was expected and what came."""
    spoilt = {**weights, "fc.weight": weights["fc.weight"].clone()}
    spoilt["fc.weight"][3, 3] = float("nan")
    wrong_size = head_weights(target, ids=IDS, size=24)
    truncated = write(tmp_path / "truncated", target, weights, IDS)
    shortened(tmp_path / "truncated", "model.safetensors")
    unread = write(tmp_path / "unread", target, weights, IDS)
    (tmp_path / "unread" / "config.json").unlink()
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    medusa = write_medusa(tmp_path / "medusa", random_heads(size=16))
    shutil.copytree(folder, tmp_path / "model")
    shortened(tmp_path / "model", "model.safetensors")
    layer = layer_config(target, SIZE, rope_scaling={"rope_type": "linear"})
    rope = write(tmp_path / "rope", target, weights, IDS, transformer_layer_config=layer)
    for source, parts in (
        (tmp_path / "absent", ["no file or folder"]),
        (nothing, ["causal language model"]),
        (truncated, ["readable weights", "truncated"]),
        (unread, ["config.json", "got none"]),
        (write(tmp_path / "nan", target, spoilt, IDS), ["without NaN", "fc.weight"]),
        (write(tmp_path / "size", target, wrong_size, IDS), ["shape", f"{3 * SIZE}"]),
        (write(tmp_path / "layers", target, weights, (1, 2, 9)), ["from 0 to 4", "got 9"]),
        (tmp_path / "model", ["deserializing"]),
        (rope, ["KeyError", "factor"]),
        (medusa, [f"hidden size of {SIZE}", "got [16, 16]"]),
    ):
        code, out, err = run(capsys, "--draft", source, "--target", folder, *PROMPT)
        lines = [line for line in out.splitlines() if line.startswith("error")]
        assert code == 1 and len(lines) == 1 and lines[0].startswith("error    load: "), out
        assert all(part in lines[0] for part in parts), lines
        assert "Traceback" not in err and "conventions" not in out
        code, report = report_of(capsys, "--draft", source, "--target", folder)
        assert code == 1 and not report["passed"] and report["conventions"] == []
        assert status(report) == {"load": "error"}


def test_targets_and_weights_that_cannot_do(capsys, target, weights, folder, tmp_path):
    """A model that is not accelerated; what overflows in the target's dtype."""
    config = CONFIG_MAPPING["mamba"](vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mamba")
    char_tokenizer().save_pretrained(tmp_path / "mamba")
    code, report = report_of(capsys, "--draft", folder, "--target", tmp_path / "mamba")
    assert code == 1 and report["kind"] is None and status(report) == {"target": "error"}
    huge = {**weights, "norm.weight": weights["norm.weight"] * 1e6}
    source = write(tmp_path / "huge", target, huge, IDS)
    code, report = report_of(capsys, "--draft", source, "--target", folder, "--dtype", "fp16")
    assert code == 1 and status(report)["finite"] == "error"


def test_draft_options_need_a_draft(capsys, tmp_path):
    code, out, err = run(capsys, "--prompt", "hello")
    assert (
        code == 2
        and out == ""
        and err == ("specdec doctor: --prompt belongs to --draft, got none\n")
    )
    code, out, err = run(capsys, "--draft", tmp_path, "--target", tmp_path / "absent")
    assert code == 2 and err.count("\n") == 1 and "give --target an existing folder" in err


def test_a_draft_model(capsys, folder):
    code, out, _ = run(capsys, "--draft", folder, "--target", folder, *PROMPT)
    assert code == 0 and "0 with different names" in out and "best: as loaded" in out
    code, report = report_of(capsys, "--draft", folder, "--target", folder)
    assert code == 0 and report["kind"] == "draft_model"
    assert status(report)["tokenizer"] == status(report)["acceptance"] == "ok"
    assert [row["convention"] for row in report["conventions"]] == ["as loaded"]
    assert report["conventions"][0]["accepted_per_position"][0] == 1


def test_warnings(capsys, target, folder, tmp_path):
    """A small vocabulary, a short context, another rope theta, ids said twice, a wrong t2d."""
    drafted = head_weights(target, ids=IDS, size=SIZE, drafted=10)
    drafted["t2d"] = ~drafted["t2d"]
    changes = dict(max_position_embeddings=200, vocab_size=VOCAB + 200, target_layer_ids=[0, 1, 3])
    source = safeailab(
        tmp_path / "3", target, drafted, IDS, hidden_size=SIZE, norm_output=True, **changes
    )
    code, report = report_of(capsys, "--draft", source, "--target", folder)
    found = status(report)
    assert code == 0 and report["checkpoint"]["draft_vocab_size"] == 10
    warned = {name for name, state in found.items() if state == "warning"}
    assert warned == {
        "vocabulary", "draft vocabulary", "hidden states", "rope theta", "positions",
        "acceptance", "coverage",
    }  # fmt: skip
    details = {check["name"]: check["detail"] for check in report["checks"]}
    assert "t2d lists other tokens" in details["draft vocabulary"]
    assert "drafting stops at 200" in details["positions"]
    assert "norm_before_residual false (not in config.json), norm_output true" in details["norms"]
    assert "says otherwise" in details["hidden states"] and details["borrowed"] == "nothing"


def test_the_other_kinds(capsys, target, folder, tmp_path):
    """EAGLE-1 has one sibling; DeepSpec's ids are read as outputs."""
    one = head_weights(target, fused=False, size=SIZE)
    source = eagle1(tmp_path / "1", target, one, rope_theta=10000.0)
    code, report = report_of(capsys, "--draft", source, "--target", folder)
    assert code == 0 and report["kind"] == "eagle" and status(report)["rope theta"] == "ok"
    assert [row["hidden_layers"] for row in report["conventions"]] == [[LAYERS], ["before norm"]]
    three = head_weights(target, ids=(1, 2, LAYERS))
    source = deepspec(tmp_path / "d", target, three, (1, 2, LAYERS))
    code, out, _ = run(capsys, "--draft", source, "--target", folder, *PROMPT)
    assert code == 0 and "layout DeepSpec" in out and "1, 2, before norm" in out


def test_clearly_above_is_more_than_chance_and_more_than_a_trifle():
    def measured(number, *accepted):
        return Measurement(number, list(accepted), 1 + sum(accepted), [])

    low, high = measured(60, 0.3, 0.1), measured(40, 0.7, 0.5)
    assert high.clearly_above(low) and not low.clearly_above(high)
    assert high.moments() == pytest.approx((1.2, 0.7 + 3 * 0.5 - 1.2**2))
    assert not measured(5, 1.0, 1.0).clearly_above(low), "too few drafts"
    assert not measured(40, 0.4, 0.2).clearly_above(low), "by chance"
    assert measured(10**6, 0.32, 0.1).moments()[0] > low.moments()[0]
    assert not measured(10**6, 0.32, 0.1).clearly_above(measured(10**6, 0.3, 0.1)), "a trifle"
    assert not low.clearly_above(low)
    assert Convention(shift=1, before_norm=True).layers((1, 3), 4) == (2, BEFORE_NORM)
