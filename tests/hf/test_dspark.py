"""DSpark drafters: what they draft, by definition, and what comes out of generate."""

import pytest
import torch
from dflash_blocks import Dense, block_weights, deepspec, speculators, zlab
from test_sampling import FALSE_ALARM, PLAIN, SMALL, WARPED, draw, joints, pvalues
from tiny import accelerated, batch, fresh, new_tokens, random_rows, tiny
from watched import check_chains, check_trees, proposals_of

import specdec_kernels as sdk
from specdec_kernels.drafting.dflash import DSparkDrafter
from specdec_kernels.hf.dflash import load_dflash
from specdec_kernels.hf.eagle import head_method

CHAINS = dict(num_speculative_tokens=4)
TREE = dict(draft_tree_topk=3)


@pytest.fixture(scope="module")
def target():
    return fresh("llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def prompts():
    return random_rows((3, 11, 1), seed=4)


@pytest.fixture(scope="module")
def texts(target, prompts):
    return new_tokens(target, batch(prompts), max_new_tokens=64)


def drafts(monkeypatch, target, prompts, texts, source, **options):
    run = monkeypatch, target, prompts, texts, source, "DSparkDrafter"
    return proposals_of(*run, method="dspark", **options)


def layout(name, folder, target):
    """A drafter of a producer and what it means: the folder, weights and settings of `Dense`."""
    kind = dict(speculators_model_type="dspark")
    if name == "DeepSpec":
        weights = block_weights(target, rank=5, confidence="both")
        return deepspec(folder, target, weights), weights, dict(from_anchor=True)
    if name == "speculators, reduced vocabulary":
        weights = block_weights(target, rank=5, drafted=40, own_embedding=True, size=24)
        source = speculators(folder, target, weights, sample_from_anchor=True, **kind)
        return source, weights, dict(from_anchor=True)
    assert name == "speculators, not from the anchor"
    weights = block_weights(target, rank=4, confidence="state")
    return speculators(folder, target, weights, **kind), weights, {}


LAYOUTS = ["DeepSpec", "speculators, reduced vocabulary", "speculators, not from the anchor"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_those_of_the_definition(name, target, prompts, texts, tmp_path, monkeypatch):
    """C16: chains, and the likeliest trees by what a token makes of the next one's distribution."""
    source, weights, settings = layout(name, tmp_path, target)
    dense = Dense(target, weights, **settings)
    run = monkeypatch, target, prompts, texts, source
    check_chains(drafts(*run, **CHAINS), dense)
    trees = drafts(*run, num_speculative_tokens=8, draft_tree_topk=3, draft_tree_depth=3)
    check_trees(trees, dense, 3, 3)


def test_pairs_matter(target, prompts, texts, tmp_path, monkeypatch):
    """The same drafts without the token before would not be those of the definition."""
    source, weights, settings = layout("DeepSpec", tmp_path, target)
    monkeypatch.setattr(DSparkDrafter, "_behind", lambda self, tokens, logits: logits)
    found = drafts(monkeypatch, target, prompts, texts, source, **CHAINS)
    with pytest.raises(AssertionError):
        check_chains(found, Dense(target, weights, **settings))


@pytest.mark.parametrize("confidence", ["both", "state"])
def test_chains_end_where_confidence_does(
    confidence, target, prompts, texts, tmp_path, monkeypatch
):
    weights = block_weights(target, rank=5, confidence=confidence)
    source = deepspec(tmp_path, target, weights)
    dense = Dense(target, weights, from_anchor=True)
    run = monkeypatch, target, prompts, texts, source
    lengths = set()
    for text, found, nodes, depth in drafts(*run, **CHAINS, draft_p_min=0.5):
        expected = dense.chain(text, min(nodes, depth), sure=0.5)
        assert sorted(found) == [tuple(expected[: n + 1]) for n in range(len(expected))]
        lengths.add(len(found))
    assert {0, 1, 4} <= lengths


@pytest.mark.parametrize("options", [{}, TREE])
def test_greedy_text_is_that_of_the_target(options, tmp_path):
    target = fresh("llama")
    weights = block_weights(target, ids=(0, 2, 1), rank=5, confidence="both")
    source = deepspec(tmp_path, target, weights, (0, 2, 1), max_position_embeddings=60)
    rows = random_rows((3, 9, 21), seed=1)
    for inputs in (batch(rows[1:2]), batch(rows)):
        expected = new_tokens(target, inputs)
        end = expected[0][10]
        ended = new_tokens(target, inputs, eos_token_id=end)
        for size in (1, 6, None):
            given = dict(options, method="dspark", num_speculative_tokens=size)
            with accelerated(target, model=source, **given) as metrics:
                assert new_tokens(target, inputs) == expected
                assert new_tokens(target, inputs, eos_token_id=end) == ended
            assert size is None or metrics.num_draft_tokens > 0


DRAWN = dict(draft_sample_method="probabilistic")


@pytest.fixture(params=[None, 5], ids=["all tokens", "five of eight"])
def small(request, tmp_path):
    """The target of test_sampling, and a drafter over some of its eight tokens."""
    target = fresh("llama", **SMALL)
    size = dict(drafted=request.param, own_lm_head=True, scale=0.2, rank=2)
    weights = block_weights(tiny("llama", **SMALL), ids=(0, 1), **size)
    weights["markov_head.markov_w2.weight"] *= 4  # or leaving it out would hardly be seen
    changes = dict(speculators_model_type="dspark", sample_from_anchor=True, mask_token_id=6)
    return target, speculators(tmp_path, target, weights, (0, 1), block_size=3, **changes)


@pytest.mark.parametrize(
    "name, options",
    [
        ("plain", DRAWN),
        ("warped", dict(rule="block", **DRAWN)),
        ("warped", dict(rule="coupled", **DRAWN)),
        ("plain", TREE),
    ],
    ids=str,
)
def test_c13_a03_exact_joint(small, name, options):
    target, source = small
    torch.manual_seed(1)
    options = dict(options, method="dspark", num_speculative_tokens=3)
    with accelerated(target, model=source, **options) as metrics:
        counts = draw(target, 6_300, **(WARPED if name == "warped" else PLAIN))
    assert metrics.num_accepted_tokens > 250
    assert min(pvalues(counts, joints(name))) > FALSE_ALARM


def test_negative_control_of_the_pairs(small, monkeypatch):
    """Drafts that were drawn, said to be drawn without the token before."""
    chain = DSparkDrafter._chain

    def wrong(self, roots, logits, *rest):
        tree = chain(self, roots, logits, *rest)
        laws = torch.stack([*logits, logits[-1]], 1)[:, : tree.width]
        return tree._replace(draft_logits=laws.float())

    monkeypatch.setattr(DSparkDrafter, "_chain", wrong)
    target, source = small
    torch.manual_seed(1)
    options = dict(method="dspark", num_speculative_tokens=3, **DRAWN)
    with accelerated(target, model=source, **options):
        counts = draw(target, 8_400, **PLAIN)
    assert min(pvalues(counts, joints("plain"))) < FALSE_ALARM


def test_copies_of_the_targets_tables_are_not_kept(tmp_path):
    target = fresh("llama")
    weights = block_weights(target, ids=(1, 2, 1), rank=5)
    source = deepspec(tmp_path, target, weights, (1, 2, 1))
    network = load_dflash(source, "dspark", target, "auto").network
    assert network.lm_head.weight is target.lm_head.weight
    assert network.embed_tokens.weight is target.model.embed_tokens.weight
    assert network.drafted == 6 and head_method(source) == "dspark"


def test_what_does_not_fit_says_why(tmp_path):
    target = fresh("llama")
    weights = block_weights(target, ids=(1, 2, 1), rank=5, confidence="both")
    gated = deepspec(tmp_path / "g", target, weights, (1, 2, 1), markov_head_type="gated")
    source = deepspec(tmp_path / "d", target, weights, (1, 2, 1))
    lost = {n: w for n, w in weights.items() if n != "markov_head.markov_w2.weight"}
    extra = {**weights, "markov_head.gate_proj.weight": torch.ones(2, 2)}
    plain = zlab(tmp_path / "z", target, block_weights(target, ids=(1, 2, 1)), (1, 2, 1))
    for method, path, message in (
        ("dspark", gated, "one of DSpark with markov_head_type 'gated', which is not supported"),
        ("dspark", deepspec(tmp_path / "l", target, lost), "expected markov_head.markov_w2.weight"),
        ("dspark", deepspec(tmp_path / "e", target, extra), "got markov_head.gate_proj.weight"),
        ("dspark", plain, "expected 'dflash' for this drafter, got 'dspark'"),
        ("dflash", source, "expected 'dspark' for this drafter, got 'dflash'"),
    ):
        with pytest.raises(ValueError, match=message):
            sdk.patch(target, method=method, model=path)
