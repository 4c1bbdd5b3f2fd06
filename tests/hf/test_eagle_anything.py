"""Any head, any layers, any settings, memory full of NaN: drafts by definition (A06, C16, C17)."""

import random

import pytest
from eagle_heads import Dense, eagle1, head_weights, safeailab, speculators
from mtp_layers import DenseMtp, layer_weights, speculators_mtp
from test_draft_model_anything import nan_memory, short_memory  # noqa: F401
from tiny import accelerated, batch, fresh, new_tokens, random_rows
from watched import Watched

from specdec_kernels.drafting.eagle import EagleDrafter


class Wanderer(Watched, EagleDrafter):
    """Accepts as chance has it."""

    r = None

    def plan(self, b, text):
        self.steps = self.r.randint(0, 3)
        return super().plan(b, text)


def head(r, folder, target, positions):
    """A head's folder and its definition."""
    size, layers = target.config.hidden_size, r.choice((1, 1, 2))
    if r.random() < 0.3:  # nothing norms its attention's input: larger weights would be chaos
        weights = head_weights(
            target, fused=False, size=size, layers=layers, scale=0.1, own_lm_head=False
        )
        source = eagle1(folder, target, weights, max_position_embeddings=positions)
        full = {**weights, "lm_head.weight": target.lm_head.weight}
        return source, Dense(target, full, (), fused=False)
    ids = tuple(r.randint(0, target.config.num_hidden_layers) for _ in range(r.randint(1, 4)))
    norms = dict(norm_before_fc=r.random() < 0.5, fc_norm=r.random() < 0.5)
    weights = head_weights(
        target, ids=ids, layers=layers, drafted=r.choice((None, 10, 50)), biases=r.random() < 0.3,
        qk_norms=r.random() < 0.3, seed=r.randint(0, 99), **norms,
    )  # fmt: skip
    output = r.random() < 0.5
    if r.random() < 0.5 and positions == 512:
        source = speculators(folder, target, weights, ids, norm_output=output, **norms)
        return source, Dense(target, weights, ids, norm_before_residual=True, norm_output=output)
    flags = dict(max_position_embeddings=positions, norm_output=output)
    source = safeailab(folder, target, weights, ids, **flags)
    return source, Dense(target, weights, ids, norm_output=output)


def mtp_layers(r, folder, target, positions):
    weights = layer_weights(target, r.randint(1, 4), seed=r.randint(0, 99))
    source = speculators_mtp(folder, target, weights, max_position_embeddings=positions)
    return source, DenseMtp(target, weights)


@pytest.mark.usefixtures("short_memory")
@pytest.mark.parametrize("seed", range(20))
def test_fuzz(seed, tmp_path, monkeypatch, nan_memory):  # noqa: F811
    check_anything(seed, tmp_path, monkeypatch, nan_memory, head)


@pytest.mark.usefixtures("short_memory")
@pytest.mark.parametrize("seed", range(12))
def test_fuzz_of_mtp_layers(seed, tmp_path, monkeypatch, nan_memory):  # noqa: F811
    check_anything(seed, tmp_path, monkeypatch, nan_memory, mtp_layers)


def check_anything(seed, tmp_path, monkeypatch, nan_memory, head):  # noqa: F811
    monkeypatch.setattr("specdec_kernels.drafting.recurrent.CHUNK", 5)
    r = random.Random(seed)
    target = fresh(r.choice(("llama", "qwen3", "mistral", "phi3")))
    positions = r.choice((512, 512, 30))
    source, dense = head(r, tmp_path, target, positions)
    prompts = random_rows([r.randint(1, 30) for _ in range(r.randint(1, 4))], seed=seed)
    inputs, new = batch(prompts), r.randint(2, 40)
    texts = new_tokens(target, inputs, max_new_tokens=new)
    topk, levels = r.choice((1, 2, 4)), r.choice((None, 1, 3))
    proposals = []
    monkeypatch.setattr(Watched, "proposals", proposals)
    monkeypatch.setattr(Wanderer, "r", r)
    monkeypatch.setattr(
        Watched, "future", lambda self, b, text: texts[b][len(text) - len(prompts[b]) :]
    )
    monkeypatch.setattr("specdec_kernels.drafting.factory.EagleDrafter", Wanderer)
    nan_memory()
    options = dict(draft_tree_topk=topk, draft_tree_depth=levels)
    size = r.choice((None, 1, 4, 9))
    with accelerated(target, model=source, num_speculative_tokens=size, **options):
        assert new_tokens(target, inputs, max_new_tokens=new) == texts
    for text, found, nodes, depth in proposals:
        limit = max(min(nodes, depth, positions - len(text) + 2), 0)
        limit = 0 if len(text) < dense.least_text else limit
        if topk == 1:
            chain = dense.chain(text, limit)
            assert sorted(found) == [tuple(chain[: n + 1]) for n in range(len(chain))]
        else:
            limit = min(limit, levels or limit)
            assert found.keys() == dense.tree(text, topk, nodes, limit).keys()
