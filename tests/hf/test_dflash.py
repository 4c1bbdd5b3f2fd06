"""DFlash drafters: what they draft, by definition."""

import pytest
import torch
from dflash_blocks import Dense, block_weights, speculators, zlab
from tiny import batch, fresh, new_tokens, random_rows
from watched import check_chains, check_trees, proposals_of

from specdec_kernels.drafting.dflash import BlockRun
from specdec_kernels.drafting.unread import Unread


@pytest.fixture(scope="module")
def target():
    return fresh("llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def prompts():
    return random_rows((3, 11, 1), seed=4)


@pytest.fixture(scope="module")
def texts(target, prompts):
    return new_tokens(target, batch(prompts), max_new_tokens=64)


CHAINS = dict(num_speculative_tokens=4, draft_tree_topk=1)


def drafts(monkeypatch, target, prompts, texts, source, **options):
    run = monkeypatch, target, prompts, texts, source, "DFlashDrafter"
    return proposals_of(*run, method="dflash", **options)


def test_chains_are_those_of_the_definition(target, prompts, texts, tmp_path, monkeypatch):
    """C16: every step's draft, from true hidden states of the target alone; ragged rows."""
    weights = block_weights(target)
    source = zlab(tmp_path, target, weights)
    found = drafts(monkeypatch, target, prompts, texts, source, **CHAINS)
    check_chains(found, Dense(target, weights))


def shifted_features(monkeypatch):
    """Token i as the target's hidden state of token i + 1."""
    add = Unread.add
    monkeypatch.setattr(Unread, "add", lambda *args: add(*args[:-1], args[-1].roll(-1, 1)))


def block_kept(monkeypatch):
    """The K and V of a block's first slot in place of those of the text."""
    read = BlockRun._read

    def one_less(self, counts):
        before = list(self.kv.lens)
        read(self, counts)
        if min(before) > 20:
            for layer in self.kv.keys:
                self.kv.keys[layer][:, :, before[0]] = self.kv.keys[layer][:, :, 0]

    monkeypatch.setattr(BlockRun, "_read", one_less)


def rejected_kept(monkeypatch):
    """All slots of a window count as accepted."""
    add = Unread.add

    def wrong(self, decision, features):
        path = torch.arange(features.shape[1], dtype=torch.int32).expand(len(features), -1)
        add(self, decision._replace(path=path), features)

    monkeypatch.setattr(Unread, "add", wrong)


def one_place_on(monkeypatch):
    """Slot i's token is taken for the one behind it."""
    states = BlockRun.states
    monkeypatch.setattr(BlockRun, "states", lambda *args: states(*args).roll(1, 1))


BROKEN = [shifted_features, block_kept, rejected_kept, one_place_on]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_drafter_would_be_seen(broken, target, prompts, texts, tmp_path, monkeypatch):
    weights = block_weights(target)
    source = zlab(tmp_path, target, weights)
    broken(monkeypatch)
    found = drafts(monkeypatch, target, prompts, texts, source, **CHAINS)
    with pytest.raises(AssertionError):
        check_chains(found, Dense(target, weights))


@pytest.mark.parametrize("topk, levels", [(3, 3), (None, None), (2, None)])
def test_trees_are_the_likeliest(target, prompts, texts, tmp_path, monkeypatch, topk, levels):
    """DDTree: the best paths by the product of the marginals' probabilities."""
    weights = block_weights(target)
    source = zlab(tmp_path, target, weights)
    options = dict(num_speculative_tokens=12, draft_tree_topk=topk, draft_tree_depth=levels)
    found = drafts(monkeypatch, target, prompts, texts, source, **options)
    check_trees(found, Dense(target, weights), topk or 10, levels or 99)


SLIDES = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=9)


def layout(name, folder, target):
    """A drafter of a producer and what it means: the folder, weights and settings of `Dense`."""
    if name == "speculators, reduced vocabulary":
        weights = block_weights(target, drafted=40, own_embedding=True, size=24)
        return speculators(folder, target, weights), weights, {}
    if name == "speculators, whole vocabulary":
        weights = block_weights(target, biases=True, qk_norms=False)
        return speculators(folder, target, weights), weights, {}
    if name == "speculators, sliding":
        weights = block_weights(target)
        source = speculators(folder, target, weights, layer=SLIDES)
        return source, weights, dict(windows=(9, None), causal=(True, False))
    if name == "speculators, sliding both ways":
        weights = block_weights(target)
        source = speculators(folder, target, weights, layer=SLIDES, sliding_window_non_causal=True)
        return source, weights, dict(windows=(9, None))
    if name == "block size in dflash_config, prefixed names":
        weights = block_weights(target, layers=1, ids=(6, 1))
        stored = {"model." + n: w for n, w in weights.items()}
        stored["norm.weight"] = stored.pop("model.norm.weight")  # of which the size is read
        nested = dict(block_size=5)
        source = zlab(folder, target, stored, (6, 1), nested, block_size=None)
        return source, weights, dict(ids=(6, 1), causal=(False,), block=5)
    if name == "windows by dflash_config":
        weights = block_weights(target)
        nested = dict(use_swa=True, swa_window_size=8)
        return zlab(folder, target, weights, nested=nested), weights, dict(windows=(8, 8))
    if name == "causal by is_causal":
        weights = block_weights(target)
        changes = dict(SLIDES, is_causal=False, final_logit_softcapping=2.0)
        return (
            zlab(folder, target, weights, **changes),
            weights,
            dict(windows=(9, None), softcap=2.0),
        )
    assert name == "causal by dflash_config"
    weights = block_weights(target)
    source = zlab(folder, target, weights, nested=dict(causal=True))
    return source, weights, dict(causal=(True, True))


LAYOUTS = [
    "speculators, reduced vocabulary",
    "speculators, whole vocabulary",
    "speculators, sliding",
    "speculators, sliding both ways",
    "block size in dflash_config, prefixed names",
    "windows by dflash_config",
    "causal by is_causal",
    "causal by dflash_config",
]


@pytest.mark.parametrize("name", LAYOUTS)
def test_c16_c14_layouts_of_every_producer(name, target, prompts, texts, tmp_path, monkeypatch):
    """Which hidden states arrive, what a slot sees, whose tables stand in for missing ones."""
    source, weights, settings = layout(name, tmp_path, target)
    dense = Dense(target, weights, **settings)
    run = monkeypatch, target, prompts, texts, source
    check_chains(drafts(*run, **CHAINS), dense)
    trees = drafts(*run, num_speculative_tokens=8, draft_tree_topk=3, draft_tree_depth=3)
    check_trees(trees, dense, 3, 3)
