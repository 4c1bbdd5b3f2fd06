"""EAGLE heads as drafters: what they draft, by definition, and what comes out of generate."""

import pytest
from heads import Dense, head_weights, safeailab
from tiny import accelerated, batch, fresh, new_tokens, random_rows, wrong

from specdec_kernels.drafting.eagle import EagleDrafter
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
                self.proposals.append((text, paths(tree, b)))
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
    """[(text, {path: slot})] of every step and row, with acceptances of every length between."""
    proposals = []
    monkeypatch.setattr(Watched, "proposals", proposals)
    monkeypatch.setattr(
        Watched, "future", lambda self, b, text: texts[b][len(text) - len(prompts[b]) :]
    )
    monkeypatch.setattr("specdec_kernels.drafting.EagleDrafter", Watched)
    with accelerated(target, model=source, **options) as metrics:
        out = new_tokens(target, batch(prompts), max_new_tokens=len(texts[0]))
    assert out == texts
    assert len(metrics.accepted_per_position) >= 3 and min(metrics.accepted_per_position) > 5
    return proposals


def check_chains(proposals, dense, size=4):
    assert len(proposals) > 60
    for text, found in proposals:
        drafted = max(found, key=len, default=())
        assert list(drafted) == dense.chain(text, len(drafted))
        assert len(found) == len(drafted)
    assert sum(len(found) == size for _, found in proposals) > 50


def test_chains_are_those_of_the_definition(target, prompts, texts, tmp_path, monkeypatch):
    """C16: every step's draft, from true hidden states of the target alone; ragged rows."""
    weights = head_weights(target, drafted=40)
    source = safeailab(tmp_path, target, weights, IDS)
    proposals = proposals_of(monkeypatch, target, prompts, texts, source, num_speculative_tokens=4)
    check_chains(proposals, Dense(target, weights, IDS))
