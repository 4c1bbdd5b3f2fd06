"""Any family as a draft model, and any settings of one, with fresh memory full of NaN (A06)."""

import random

import pytest
import torch
from test_draft_model import noisy
from tiny import FAMILIES, accelerated, batch, fresh, has_family, new_tokens, random_rows, tiny


@pytest.fixture(autouse=True)
def short_memory(monkeypatch):
    """Storage grows within a run; text that was left unread comes in small windows."""
    monkeypatch.setattr("specdec_kernels.cache.GROWTH", 8)
    monkeypatch.setattr("specdec_kernels.decoding.rows.GROWTH", 8)
    monkeypatch.setattr("specdec_kernels.drafting.draft_model.LONGEST_WINDOW", 3)


@pytest.fixture
def nan_memory(monkeypatch):
    original = torch.Tensor.new_empty

    def new_nan(self, *size, **options):
        out = original(self, *size, **options)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return lambda: monkeypatch.setattr(torch.Tensor, "new_empty", new_nan)


@pytest.mark.parametrize("name", [name for name in FAMILIES if has_family(name)])
def test_b05_every_family_drafts_for_itself(name, nan_memory):
    target = fresh(name)
    inputs = batch(random_rows((3, 9, 21), seed=1))
    expected = new_tokens(target, inputs, max_new_tokens=24)
    nan_memory()
    with accelerated(target, model=fresh(name), num_speculative_tokens=4) as metrics:
        assert new_tokens(target, inputs, max_new_tokens=24) == expected
    assert metrics.acceptance_rate == 1


def draft_model(r, target_name):
    """The target, spoilt or not, or another model; sometimes with fewer positions or tokens."""
    if r.random() < 0.5:
        return noisy(tiny(target_name), r.choice((0, 0.02, 0.05)), r.randint(0, 99))
    name, settings = r.choice(("llama", "gpt2", "gemma3_text")), {}
    if r.random() < 0.5:
        settings["max_position_embeddings"] = limit = r.randint(4, 40)
        if name == "gpt2":
            settings["n_positions"] = limit
    if r.random() < 0.5:
        settings["vocab_size"] = r.choice((70, 120))
    return fresh(name, **settings)


@pytest.mark.parametrize("seed", range(24))
def test_fuzz(seed, nan_memory):
    r = random.Random(seed)
    name = r.choice(("llama", "gpt2", "mistral", "phi3"))
    target, draft = fresh(name), draft_model(r, name)
    inputs = batch(random_rows([r.randint(1, 30) for _ in range(r.randint(1, 4))], seed=seed))
    size = r.choice((None, 1, 2, 5, 9))
    options = dict(
        num_speculative_tokens=size,
        draft_tree_topk=r.choice((1, 1, 2, 3)),
        draft_p_min=r.choice((0, 0, 0.02, 0.05)),
        draft_min_tokens=r.choice((0, 0, 1, size or 3)),
    )
    settings = dict(max_new_tokens=r.randint(1, 40), repetition_penalty=r.choice((1.0, 1.0, 1.2)))
    text = new_tokens(target, inputs, **settings)
    if r.random() < 0.5:
        settings["eos_token_id"] = r.choice(text[0])
    expected = new_tokens(target, inputs, **settings)
    nan_memory()
    with accelerated(target, model=draft, **options):
        assert new_tokens(target, inputs, **settings) == expected
