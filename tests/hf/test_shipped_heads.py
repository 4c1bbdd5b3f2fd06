"""The heads under examples/heads: they load, draft for the packaged model, and stay small."""

import io
import json
from pathlib import Path

import pytest
import torch
import transformers

import specdec_kernels as sdk
from specdec_kernels.cli import model as models
from specdec_kernels.cli.console import Progress
from specdec_kernels.cli.prompts import PROMPTS

HEADS = Path(__file__).parents[2] / "examples" / "heads"
SIZE = 24e6
METHODS = ("eagle3", "mtp")

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(models.package_missing() is not None, reason="no model package"),
    pytest.mark.skipif(
        int(transformers.__version__.split(".")[0]) < 5, reason="the tokenizer is newer"
    ),
    pytest.mark.skipif(not HEADS.is_dir(), reason="source distributions come without the heads"),
]


@pytest.fixture(scope="module")
def case():
    """The model in fp32, a prompt for it, and what it writes alone."""
    model, tokenizer, _ = models.load(None, torch.float32, Progress(io.StringIO()))
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPTS[0].text}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    return model, inputs, model.generate(**inputs, max_new_tokens=48, do_sample=False)


@pytest.mark.parametrize("options", [{}, {"draft_tree_topk": 4}], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
def test_a_head_drafts_for_the_packaged_model(case, method, options):
    model, inputs, plain = case
    folder = HEADS / f"smollm2-135m-{method}"
    with sdk.patched(model, model=str(folder), num_speculative_tokens=4, **options):
        output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
        metrics = sdk.metrics(model).snapshot()
    assert torch.equal(output, plain)
    assert metrics["mean_acceptance_length"] > 1.4


def test_the_heads_are_small_and_say_how_they_were_made():
    assert sum(file.stat().st_size for file in HEADS.rglob("*") if file.is_file()) < SIZE
    for method in METHODS:
        about = json.loads((HEADS / f"smollm2-135m-{method}" / "training.json").read_text())
        settings, first, last = about["options"], about["log"][0], about["log"][-1]
        assert settings["seed"] == 0 and last["update"] == settings["updates"]
        assert last["agreement"][0] > first["agreement"][0]
