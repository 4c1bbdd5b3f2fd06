"""MTP layers through generate: the text is the target's, whatever the layers say."""

import gc
import weakref

import pytest
import torch
from mtp_layers import layer_weights, speculators_mtp
from test_sampling import FALSE_ALARM, PLAIN, SMALL, WARPED, draw, joints, pvalues
from tiny import VOCAB, accelerated, batch, fresh, new_tokens, random_rows
from watched import Watched

import specdec_kernels as sdk
from specdec_kernels.drafting.eagle import EagleDrafter
from specdec_kernels.hf import mtp
from specdec_kernels.hf.patch import _engines

TREE = dict(draft_tree_topk=3)
DRAWN = dict(draft_sample_method="probabilistic")


def prophet(folder, by, layers):
    """A target whose next token is a permutation of its last one, and layers that say the same.

    Hidden states are single numbers out of as many as there are tokens. by: whether the layers go
    by the token that they read, or by the hidden state, which is that of the token before.
    """
    size = VOCAB
    target = fresh("llama", hidden_size=size)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(2))
    follows = torch.empty_like(order)
    follows[order] = order.roll(-1)  # one cycle through all tokens
    step = torch.zeros(size, size)
    step[follows, torch.arange(size)] = 1
    target.model.embed_tokens.weight.data = torch.eye(size)
    target.model.norm.weight.data.fill_(1)
    target.lm_head.weight.data = step.clone()
    weights = layer_weights(target, layers)
    for name, weight in weights.items():
        weight[:] = 1 if weight.dim() == 1 else 0
        if name.endswith("input_proj.weight"):
            token, state = weight[:, :size], weight[:, size:]
            if by == "token":
                token[:] = torch.eye(size)
            else:
                state[:] = step
    return target, speculators_mtp(folder, target, weights)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("by", ["token", "hidden state"])
def test_b05_layers_that_know_the_text_have_all_of_it_accepted(by, layers, tmp_path):
    """Over 200 tokens; a token or a state too early or too late would be wrong every time."""
    target, source = prophet(tmp_path, by, layers)
    for rows in ((7,), (3, 9, 21)):
        inputs = batch(random_rows(rows, seed=1, low=0))
        expected = new_tokens(target, inputs, max_new_tokens=200)
        assert len(set(expected[0])) == VOCAB
        with accelerated(target, model=source, num_speculative_tokens=5) as metrics:
            assert new_tokens(target, inputs, max_new_tokens=200) == expected
        assert metrics.acceptance_rate == 1 and metrics.num_steps == 34


@pytest.mark.parametrize("by", ["token", "hidden state"])
def test_b05_also_behind_drafts_that_were_wrong(by, tmp_path, monkeypatch):
    target, source = prophet(tmp_path, by, 2)
    prompts = random_rows((3, 9), seed=1, low=0)
    texts = new_tokens(target, batch(prompts), max_new_tokens=100)
    proposals = []
    monkeypatch.setattr(Watched, "proposals", proposals)
    monkeypatch.setattr(
        Watched, "future", lambda self, b, text: texts[b][len(text) - len(prompts[b]) :]
    )
    watched = type("Watched", (Watched, EagleDrafter), {})
    monkeypatch.setattr("specdec_kernels.drafting.factory.EagleDrafter", watched)
    with accelerated(target, model=source, num_speculative_tokens=4):
        assert new_tokens(target, batch(prompts), max_new_tokens=100) == texts
    assert len(proposals) > 60
    for text, found, nodes, depth in proposals:
        row = 0 if text[: len(prompts[0])] == prompts[0] else 1
        true = texts[row][len(text) - len(prompts[row]) :][: min(nodes, depth)]
        assert max(found, default=(), key=len) == tuple(true)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("options", [{}, TREE, dict(draft_tree_topk=2, draft_tree_depth=2)])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2"])
def test_greedy_text_is_that_of_the_target(name, options, layers, tmp_path):
    """C17: Llama's layer for any target; batches of 1, 2 and 3, ragged; B15: left padding."""
    target = fresh(name)
    source = speculators_mtp(tmp_path, target, layer_weights(target, layers))
    rows = random_rows((3, 9, 21), seed=1)
    for inputs in (batch(rows[1:2]), batch(rows)):
        expected = new_tokens(target, inputs)
        for size in (1, 5, None):
            settings = dict(options, model=source, num_speculative_tokens=size)
            with accelerated(target, **settings) as metrics:
                assert new_tokens(target, inputs) == expected
            assert size is None or metrics.num_draft_tokens > 0


@pytest.mark.parametrize("options", [{}, TREE])
def test_an_end_inside_a_draft(options, tmp_path):
    target, source = prophet(tmp_path, "token", 2)
    inputs = batch(random_rows((3, 9, 21), seed=1))
    ends = dict(eos_token_id=new_tokens(target, inputs)[0][10], pad_token_id=0)
    expected = new_tokens(target, inputs, **ends)
    with accelerated(target, model=source, num_speculative_tokens=6, **options):
        assert new_tokens(target, inputs, **ends) == expected


@pytest.mark.parametrize("options", [{}, TREE])
def test_layers_with_fewer_positions_stop_drafting(options, tmp_path):
    target = fresh("llama")
    weights = layer_weights(target, 2)
    source = speculators_mtp(tmp_path, target, weights, max_position_embeddings=40)
    inputs = batch(random_rows((3, 9, 45), seed=1))
    expected = new_tokens(target, inputs, max_new_tokens=60)
    with accelerated(target, model=source, num_speculative_tokens=3, **options) as metrics:
        assert new_tokens(target, inputs, max_new_tokens=60) == expected
    assert 20 < metrics.num_draft_tokens < 3 * 2 * 40


@pytest.mark.parametrize("layers", [1, 3])
def test_a_long_prompt_is_read_in_pieces(layers, tmp_path, monkeypatch):
    monkeypatch.setattr("specdec_kernels.drafting.recurrent.CHUNK", 16)
    target, source = prophet(tmp_path, "hidden state", layers)
    inputs = batch(random_rows((3, 100, 77), seed=1))
    expected = new_tokens(target, inputs)
    with accelerated(target, model=source, num_speculative_tokens=4) as metrics:
        assert new_tokens(target, inputs) == expected
    assert metrics.acceptance_rate == 1


@pytest.mark.parametrize(
    "name, options",
    [
        ("plain", DRAWN),
        ("plain", dict(rule="block", **DRAWN)),
        ("warped", dict(rule="coupled", **DRAWN)),
        ("warped", {}),
        ("plain", dict(rule="recursive", **TREE)),
    ],
    ids=str,
)
def test_a03_exact_joint(name, options, tmp_path):
    """The target's law, chains and trees, drawn or best."""
    target = fresh("llama", **SMALL)
    source = speculators_mtp(tmp_path, target, layer_weights(target, 2, scale=0.2))
    torch.manual_seed(1)
    with accelerated(target, model=source, num_speculative_tokens=3, **options) as metrics:
        counts = draw(target, 8_400, **(WARPED if name == "warped" else PLAIN))
    assert metrics.num_accepted_tokens > 250
    assert min(pvalues(counts, joints(name))) > FALSE_ALARM


def test_together_with_another_drafter(tmp_path):
    """Its layers read what others drafted."""
    target, source = prophet(tmp_path, "hidden state", 2)
    inputs = batch(random_rows((3, 9, 21), seed=1))
    expected = new_tokens(target, inputs, max_new_tokens=150)
    for method in ("suffix+mtp", "ngram,mtp"):
        with accelerated(target, method=method, model=source, num_speculative_tokens=4) as metrics:
            assert new_tokens(target, inputs, max_new_tokens=150) == expected
        assert metrics.drafters["mtp"]["num_accepted_tokens"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_layers_take_the_targets_dtype(dtype, tmp_path):
    target = fresh("llama").to(dtype)
    source = speculators_mtp(tmp_path, target, layer_weights(target, 2))
    inputs = batch(random_rows((3, 9, 21), seed=1))
    for options in ({}, TREE):
        with accelerated(target, model=source, num_speculative_tokens=4, **options) as metrics:
            new_tokens(target, inputs)
        assert metrics.num_draft_tokens > 0


def test_unpatching_frees_the_layers(tmp_path, monkeypatch):
    """Read once for each patch, whatever is generated."""
    reads, original = [], mtp.read_weights
    monkeypatch.setattr(mtp, "read_weights", lambda *args: reads.append(1) or original(*args))
    target = fresh("llama")
    sdk.patch(target, model=speculators_mtp(tmp_path, target, layer_weights(target, 2)))
    inputs = batch(random_rows((5,)))
    new_tokens(target, inputs)
    new_tokens(target, inputs)
    assert reads == [1]
    layer = weakref.ref(_engines[target].draft.head.layers[0])
    sdk.unpatch(target)
    gc.collect()
    assert layer() is None
    sdk.patch(target, model=str(tmp_path))
    alive = weakref.ref(target)
    del target
    gc.collect()
    assert alive() is None
