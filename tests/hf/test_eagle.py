"""EAGLE heads as drafters: what they draft, by definition, and what comes out of generate."""

import pytest
from eagle_heads import Dense, deepspec, eagle1, head_weights, safeailab, speculators
from tiny import accelerated, batch, fresh, new_tokens, random_rows, wrong

from specdec_kernels.drafting.eagle import EagleDrafter, HeadRun
from specdec_kernels.tree import ROOT_PARENT, DraftTree

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


class Watched(EagleDrafter):
    """Remembers what it proposed, and then proposes the true text as far as `plan` says."""

    proposals = None
    future = None
    steps = 0

    def propose(self, tokens, lens, sampling, max_nodes, max_depth):
        tree = super().propose(tokens, lens, sampling, max_nodes, max_depth)
        rows, links = [], []
        for b, (length, nodes) in enumerate(zip(lens.tolist(), max_nodes, strict=True)):
            text = tokens[b, :length].tolist()
            if nodes:
                self.proposals.append((text, paths(tree, b), nodes - 1, max_depth[b]))
            row, parents = self.plan(b, text) if nodes else ([], [])
            rows.append(row)
            links.append(parents)
        self.steps += 1
        return DraftTree.from_lists(rows, links)

    def plan(self, b, text):
        """A wrong sibling, and 0 to 3 true tokens behind it with a wrong one at the end."""
        true = self.future(b, text)[: (self.steps + b) % 4]
        row, parents = [text[-1], wrong(true[0]) if true else 5], [ROOT_PARENT, 0]
        for token in [*true, 7]:
            parents.append(0 if len(row) == 2 else len(row) - 1)
            row.append(token)
        left = len(self.future(b, text))
        return (row, parents) if left > len(true) + 1 else (row[:1], parents[:1])


def paths(tree, b):
    """{path: slot} of a row's drafted nodes."""
    found = {0: ()}
    for slot in range(1, int(tree.num_nodes[b])):
        found[slot] = (*found[int(tree.parents[b, slot])], int(tree.draft_token_ids[b, slot]))
    return {path: slot for slot, path in found.items() if slot}


def proposals_of(monkeypatch, target, prompts, texts, source, **options):
    """Of every step and row the text, {path: slot}, and the tree's limits: nodes and levels."""
    proposals = []
    monkeypatch.setattr(Watched, "proposals", proposals)
    monkeypatch.setattr(
        Watched, "future", lambda self, b, text: texts[b][len(text) - len(prompts[b]) :]
    )
    monkeypatch.setattr("specdec_kernels.drafting.factory.EagleDrafter", Watched)
    with accelerated(target, model=source, **options) as metrics:
        out = new_tokens(target, batch(prompts), max_new_tokens=len(texts[0]))
    assert out == texts
    assert len(metrics.accepted_per_position) >= 3 and min(metrics.accepted_per_position) > 5
    return proposals


def check_chains(proposals, dense, size=4):
    assert len(proposals) > 60
    for text, found, nodes, depth in proposals:
        expected = dense.chain(text, min(nodes, depth))
        assert sorted(found) == [tuple(expected[: n + 1]) for n in range(len(expected))]
    assert sum(len(found) == size for _, found, _, _ in proposals) > 50


def check_trees(proposals, dense, topk, levels=99):
    assert len(proposals) > 60
    for text, found, nodes, depth in proposals:
        expected = dense.tree(text, topk, nodes, min(nodes, depth, levels))
        assert found.keys() == expected.keys()
        scores = [expected[path] for path in sorted(found, key=found.get)]
        assert scores == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
    assert any(len(path) > 1 for _, found, _, _ in proposals for path in found)
    assert any(len(found) > max(map(len, found), default=0) for _, found, _, _ in proposals)


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
