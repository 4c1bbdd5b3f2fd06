"""What every step of a run proposes, while true texts and wrong ones decide how it goes on."""

import pytest
from tiny import accelerated, batch, new_tokens, wrong

from specdec_kernels.drafting import factory
from specdec_kernels.tree import ROOT_PARENT, DraftTree


class Watched:
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


def proposals_of(monkeypatch, target, prompts, texts, source, drafter="EagleDrafter", **options):
    """Of every step and row the text, {path: slot}, and the tree's limits: nodes and levels.

    drafter: name of its class in `factory`.
    """
    proposals = []
    watched = type("Watched", (Watched, getattr(factory, drafter)), {})
    watched.proposals = proposals
    watched.future = lambda self, b, text: texts[b][len(text) - len(prompts[b]) :]
    with monkeypatch.context() as patches:
        patches.setattr(factory, drafter, watched)
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
