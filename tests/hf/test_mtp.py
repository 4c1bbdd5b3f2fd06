"""MTP layers as drafters: what they draft, by definition, and what comes out of generate."""

import pytest
from mtp_layers import DenseMtp, layer_weights, speculators_mtp
from tiny import batch, fresh, new_tokens, random_rows
from watched import check_chains, check_trees, proposals_of


@pytest.fixture(scope="module")
def target():
    return fresh("llama")


@pytest.fixture(scope="module")
def prompts():
    return random_rows((3, 11, 1), seed=4)


@pytest.fixture(scope="module")
def texts(target, prompts):
    return new_tokens(target, batch(prompts), max_new_tokens=64)


def long_enough(proposals, layers):
    """Layer s lacks the first s tokens; texts that one lacks whole have no drafts."""
    short = [found for text, found, _, _ in proposals if len(text) < layers]
    assert not any(short) and len(short) == (layers > 2)
    return [p for p in proposals if len(p[0]) >= layers]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_c16_drafts_are_those_of_the_definition(
    target, prompts, texts, tmp_path, monkeypatch, layers
):
    """Layer i for step i, the last one again behind it; every row on its own."""
    weights = layer_weights(target, layers)
    source = speculators_mtp(tmp_path, target, weights)
    dense = DenseMtp(target, weights)
    run = (monkeypatch, target, prompts, texts, source)
    chains = proposals_of(*run, num_speculative_tokens=4)
    check_chains(long_enough(chains, layers), dense)
    trees = proposals_of(*run, num_speculative_tokens=12, draft_tree_topk=3, draft_tree_depth=4)
    check_trees(long_enough(trees, layers), dense, 3, 4)
