"""A replay of a text counts what `generate` counts when a model writes it."""

import sys
from pathlib import Path

import pytest
from tiny import accelerated, batch, fresh, lookup_rows, new_tokens

from specdec_kernels import native

sys.path.append(str(Path(__file__).parents[2]))  # the folder bench/ is not installed

from bench.acceptance import replayed

pytestmark = pytest.mark.skipif(native.cpu is None, reason=str(native.cpu_error))


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("method", ["ngram", "suffix", "ngram+suffix", "suffix,ngram"])
def test_a_replay_counts_what_generate_counts(method, size):
    model = fresh("llama")
    options = {"method": method, "num_speculative_tokens": size}
    (prompt,) = lookup_rows(model, lens=(9,))
    expected = []
    with accelerated(model, **options) as metrics:
        for _ in range(2):
            metrics.reset()
            (output,) = new_tokens(model, batch([prompt]), max_new_tokens=40)
            expected.append(metrics.snapshot())
    assert expected[0]["num_accepted_tokens"] > 0
    for call, counts in zip(replayed(options, prompt, output, 96), expected, strict=True):
        assert call.tokens == [*prompt, *output]
        for name in ("num_steps", "num_new_tokens", "num_draft_tokens", "accepted_per_position"):
            assert call.counts[name] == counts[name], name
