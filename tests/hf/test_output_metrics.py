"""What a call returns about itself with return_dict_in_generate."""

import json

import pytest
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens
from transformers.generation.utils import GenerateDecoderOnlyOutput


@pytest.fixture(scope="module")
def model():
    return fresh("llama")


def generate(model, inputs, **options):
    return model.generate(
        **inputs, do_sample=False, return_dict_in_generate=True, max_new_tokens=32, **options
    )


def test_counts_of_the_call_and_of_each_row(model):
    inputs = batch(lookup_rows(model))
    plain = new_tokens(model, inputs)
    eos = plain[1][9]  # rows end at different lengths
    expected = new_tokens(model, inputs, max_new_tokens=32, eos_token_id=eos, pad_token_id=0)
    lengths = [row.index(eos) + 1 if eos in row else len(row) for row in expected]
    with accelerated(model, num_speculative_tokens=4) as metrics:
        new_tokens(model, inputs)
        output = generate(model, inputs, eos_token_id=eos, pad_token_id=0)
        assert isinstance(output, GenerateDecoderOnlyOutput)
        found = output.metrics
        assert metrics.num_new_tokens > found["num_new_tokens"]
    json.dumps(found)
    assert [row["num_new_tokens"] for row in found["requests"]] == lengths
    assert len(set(lengths)) > 1
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_row_steps"):
        assert found[name] == sum(row[name] for row in found["requests"]) > 0
    assert found["num_new_tokens"] == sum(lengths)
    assert sum(found["accepted_per_position"]) == found["num_accepted_tokens"]
    for row, length in zip(found["requests"], lengths, strict=True):
        # each step emits one token and what it accepted; prefill gave one more
        assert row["num_row_steps"] + row["num_accepted_tokens"] + 1 >= length
        assert 0.0 <= row["acceptance_rate"] <= 1.0


def test_no_drafts_have_rate_0(model):
    inputs = batch(lookup_rows(model)[:1])
    with accelerated(model, method="none"):
        found = generate(model, inputs).metrics
    assert (found["acceptance_rate"], found["mean_acceptance_length"]) == (0.0, 1.0)
    assert found["requests"][0]["num_new_tokens"] == found["num_new_tokens"] == 32
