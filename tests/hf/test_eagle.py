"""EAGLE heads as drafters: what they draft, by definition, and what comes out of generate."""

import pytest
from eagle_heads import Dense, deepspec, eagle1, head_weights, safeailab, speculators
from tiny import batch, fresh, new_tokens, random_rows
from watched import check_chains, check_trees, proposals_of

from specdec_kernels.drafting.eagle import EagleDrafter, HeadRun

IDS = (2, 3, 1)


@pytest.fixture(scope="module")
def target():
    return fresh("llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def prompts():
    return random_rows((3, 11, 1), seed=4)


@pytest.fixture(scope="module")
def texts(target, prompts):
    return new_tokens(target, batch(prompts), max_new_tokens=64)


def test_chains_are_those_of_the_definition(target, prompts, texts, tmp_path, monkeypatch):
    """C16: every step's draft, from true hidden states of the target alone; ragged rows."""
    weights = head_weights(target, drafted=40)
    source = safeailab(tmp_path, target, weights, IDS)
    proposals = proposals_of(monkeypatch, target, prompts, texts, source, num_speculative_tokens=4)
    check_chains(proposals, Dense(target, weights, IDS))


def shifted_features(monkeypatch):
    """Token i with the hidden state of token i + 1."""
    add = HeadRun.add
    monkeypatch.setattr(HeadRun, "add", lambda *args: add(*args[:-1], args[-1].roll(-1, 1)))


def guesses_kept(monkeypatch):
    """The head's own output where the target's hidden state has come."""
    original = HeadRun._hidden

    def hidden(self, counts, width):
        true = original(self, counts, width)
        return self.carry[:, None].expand_as(true) if max(self.kv.lens) > 30 else true

    monkeypatch.setattr(HeadRun, "_hidden", hidden)


def one_node_less(monkeypatch):
    """The last committed token is not read."""
    original = EagleDrafter.propose
    monkeypatch.setattr(
        EagleDrafter, "propose", lambda self, t, n, *args: original(self, t.roll(1, 1), n, *args)
    )


@pytest.mark.parametrize("broken", [shifted_features, guesses_kept, one_node_less])
def test_a_broken_head_would_be_seen(broken, target, prompts, texts, tmp_path, monkeypatch):
    weights = head_weights(target, drafted=40)
    source = safeailab(tmp_path, target, weights, IDS)
    broken(monkeypatch)
    run = (monkeypatch, target, prompts, texts, source)
    proposals = proposals_of(*run, num_speculative_tokens=4)
    with pytest.raises(AssertionError):
        check_chains(proposals, Dense(target, weights, IDS))


@pytest.mark.parametrize("topk, levels", [(3, 3), (2, None), (5, None)])
def test_trees_are_those_of_the_definition(
    target, prompts, texts, tmp_path, monkeypatch, topk, levels
):
    """EAGLE-2's expansion; 5 children each on 12 levels are more than one word of ancestors."""
    weights = head_weights(target, drafted=40)
    source = safeailab(tmp_path, target, weights, IDS)
    options = dict(draft_tree_topk=topk, draft_tree_depth=levels)
    proposals = proposals_of(
        monkeypatch, target, prompts, texts, source, num_speculative_tokens=12, **options
    )
    check_trees(proposals, Dense(target, weights, IDS), topk, levels or 99)


def layout(name, folder, target):
    """A head of a producer and what it means: the folder, weights and settings of `Dense`."""
    if name == "safeailab.bin":  # EAGLE-1: the target's lm_head, its last hidden state
        size = target.config.hidden_size
        weights = head_weights(target, fused=False, size=size, own_lm_head=False, biases=True)
        weights = {n: w for n, w in weights.items() if "bias" not in n or n.startswith("fc.")}
        source = eagle1(folder, target, weights, binary=True)
        return source, {**weights, "lm_head.weight": target.lm_head.weight}, dict(fused=False)
    if name == "eagle1 of two layers":
        size = target.config.hidden_size
        weights = head_weights(target, fused=False, layers=2, size=size, own_embedding=False)
        embedding = target.model.embed_tokens.weight
        return (
            eagle1(folder, target, weights),
            {**weights, "embed_tokens.weight": embedding},
            dict(fused=False),
        )
    if name == "speculators":
        weights = head_weights(target, drafted=30, norm_before_fc=True)
        flags = dict(norm_before_fc=True, norm_output=True)
        source = speculators(folder, target, weights, IDS, **flags)
        return source, weights, dict(norm_before_residual=True, norm_output=True)
    if name == "speculators, sliding":
        weights = head_weights(target, drafted=30)
        flags = dict(norm_before_residual=False)
        source = speculators(folder, target, weights, IDS, window=9, **flags)
        return source, weights, dict(window=9)
    if name == "deepspec":
        ids = (1, 2, 4, 5, 6)
        weights = head_weights(target, ids=ids, qk_norms=True)
        return deepspec(folder, target, weights, ids), weights, dict(ids=ids)
    if name == "eagle-3.1":
        weights = head_weights(target, drafted=30, layers=2, fc_norm=True, biases=True)
        old = {"fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid."}
        old |= {"fc_norm.2.": "aux_norm_high."}
        stored = {}
        for n, w in weights.items():
            stored[next((new + n[len(o) :] for o, new in old.items() if n.startswith(o)), n)] = w
        source = safeailab(folder, target, stored, IDS, norm_output=True)
        return source, weights, dict(norm_output=True)
    assert name == "default ids, the target's tables"
    weights = head_weights(
        target, size=target.config.hidden_size, own_embedding=False, own_lm_head=False
    )
    source = safeailab(folder, target, weights, size=target.config.hidden_size)
    weights["embed_tokens.weight"] = target.model.embed_tokens.weight
    weights["lm_head.weight"] = target.lm_head.weight
    return source, weights, dict(ids=(2, 3, 3))


LAYOUTS = [
    "safeailab.bin",
    "eagle1 of two layers",
    "speculators",
    "speculators, sliding",
    "deepspec",
    "eagle-3.1",
    "default ids, the target's tables",
]


@pytest.mark.parametrize("name", LAYOUTS)
def test_c16_c14_layouts_of_every_producer(name, target, prompts, texts, tmp_path, monkeypatch):
    """Which hidden states arrive, which norms are used, whose tables stand in for missing ones."""
    source, weights, settings = layout(name, tmp_path, target)
    settings.setdefault("ids", IDS)
    dense = Dense(target, weights, **settings)
    run = (monkeypatch, target, prompts, texts, source)
    check_chains(proposals_of(*run, num_speculative_tokens=4), dense)
    trees = proposals_of(*run, num_speculative_tokens=8, draft_tree_topk=3, draft_tree_depth=3)
    check_trees(trees, dense, 3, 3)
