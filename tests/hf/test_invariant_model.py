"""linear="invariant" on the packaged model, at its real sizes."""

import io

import pytest
import torch
import transformers
from test_invariant import differing_sizes
from tiny import accelerated, batch, new_tokens

from specdec_kernels import native
from specdec_kernels.cli import model as models
from specdec_kernels.cli.console import Progress
from specdec_kernels.cli.prompts import EDIT

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(native.cpu is None, reason="needs the compiled kernels"),
    pytest.mark.skipif(models.package_missing() is not None, reason="needs the packaged model"),
    pytest.mark.skipif(
        int(transformers.__version__.split(".")[0]) < 5, reason="its tokenizer is newer"
    ),
]
CONFIG = dict(linear="invariant", seed=3)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def loaded(request):
    model, tokenizer, _ = models.load(None, request.param, Progress(io.StringIO()))
    model.generation_config.pad_token_id = 2
    return model, tokenizer


def test_logits_do_not_depend_on_the_window(loaded):
    assert differing_sizes(loaded[0], (1, 2, 5, 17, 48)) == []


@pytest.mark.parametrize("rows, sample", [(1, True), (3, False)])
def test_drafting_changes_no_token(loaded, rows, sample, lengths=(48,)):
    """200 tokens that repeat the prompt in part."""
    model, tokenizer = loaded
    texts = [f"{EDIT[i:]}\n\n{EDIT[i:][:200]}" for i in (0, 150, 400)]
    inputs = batch([tokenizer(t).input_ids for t in texts[:rows]])
    options = dict(max_new_tokens=200, min_new_tokens=200, do_sample=sample)
    with accelerated(model, method="none", **CONFIG):
        expected = new_tokens(model, inputs, **options)
    for length in lengths:
        with accelerated(model, num_speculative_tokens=length, **CONFIG) as metrics:
            assert new_tokens(model, inputs, **options) == expected, length
        assert metrics.num_accepted_tokens > 0
