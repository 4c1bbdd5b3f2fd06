"""near_ties and logit_drift, on functions and on a transformers model."""

from types import SimpleNamespace

import pytest
import torch

from specdec_kernels.testing import logit_drift, near_ties

VOCAB = 7


def table_logits(ids):
    """Logits that depend on the last token."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    return table[ids]


def greedy(prompt, size):
    ids = prompt
    for _ in range(size):
        ids = torch.cat([ids, table_logits(ids)[..., -1, :].argmax(-1, keepdim=True)], -1)
    return ids[len(prompt) :]


def test_near_ties_of_greedy_text():
    prompt = torch.tensor([1, 2])
    report = near_ties(table_logits, prompt, greedy(prompt, 9))
    assert report.differing == [] and report.largest_gap == 0.0
    assert str(report) == "0 of 9 tokens are not the argmax; largest gap 0"


def test_near_ties_names_what_differs():
    prompt, emitted = torch.tensor([1, 2]), greedy(torch.tensor([1, 2]), 9)
    row = table_logits(emitted[3])
    emitted[4] = row.argsort(descending=True)[1]
    found = near_ties(lambda ids: SimpleNamespace(logits=table_logits(ids)), prompt, emitted)
    gaps = row.sort(descending=True).values
    assert 4 in found.differing
    assert float(found.gaps[4]) == pytest.approx(float(gaps[0] - gaps[1]))
    assert found.largest_gap >= float(found.gaps[4])
    assert f"token 4: emitted {int(emitted[4])}, argmax {int(row.argmax())}" in str(found)


def running_sum(noise):
    """A model with a state, whose logits move by `noise` when it reads several tokens at once."""

    def forward(ids, state):
        sums = (0 if state is None else state) + ids.cumsum(1)
        moved = noise if ids.shape[1] > 1 and state is not None else 0.0
        logits = torch.nn.functional.one_hot(sums % VOCAB, VOCAB).float()
        logits[..., 0] += moved
        return logits, sums[:, -1:]

    return forward


@pytest.mark.parametrize("k", [1, 2, 3])
def test_logit_drift(k):
    ids = torch.randint(VOCAB, (20,), generator=torch.Generator().manual_seed(1))
    still = logit_drift(running_sum(0.0), ids, k)
    assert still.max_difference == 0.0 and still.argmax_changes == 0
    assert len(still.difference) == 20 - ((20 - 1) % (k + 1) + 1)
    moved = logit_drift(running_sum(1.5), ids, k)
    assert moved.max_difference == 1.5
    sums = ids.cumsum(0)[-len(moved.changed) :] % VOCAB
    assert 0 < moved.argmax_changes == int((sums != 0).sum())
    assert "at gaps up to 1" in str(moved)
    with pytest.raises(ValueError, match="expected more than"):
        logit_drift(running_sum(0.0), ids[: k + 1], k)


def test_on_a_transformers_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(6)
    prompt = torch.randint(2, 50, (1, 5))
    text = model.generate(prompt, max_new_tokens=20, do_sample=False)
    ties = near_ties(model, prompt, text[:, 5:])
    assert len(ties.gaps) == 20 and ties.largest_gap < 1e-3
    assert near_ties(model, prompt, (text[:, 5:] + 1) % 50).largest_gap > 0.1
    drift = logit_drift(model, text, 3)
    assert drift.max_difference < 1e-3 and drift.argmax_changes == 0
    low = logit_drift(model.bfloat16(), text, 3)
    assert low.max_difference < 5 and len(low.difference) == len(drift.difference)
