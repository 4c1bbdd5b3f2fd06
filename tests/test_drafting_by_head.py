"""EAGLE heads without a model around them: texts that grow at random, rows that pause and end."""

import pytest
import torch
from eagle_heads import DIM, EPS, HEADS, INTER, KV_HEADS, THETA, D, Dense, head_weights
from torch import nn

from specdec_kernels.drafting.cost import DraftCost
from specdec_kernels.drafting.eagle import EagleDrafter, Head, HeadConfig, HeadRun
from specdec_kernels.tree import Decision

V, SIZE, IDS = 50, 12, (4, 0)
CPU = torch.device("cpu")


class Target:
    """Stands for a model: its hidden states hang on the last two tokens."""

    class config:
        vocab_size, hidden_size = V, SIZE

        @classmethod
        def get_text_config(cls):
            return cls

    table = torch.randn(V, V, len(IDS) * SIZE, generator=torch.Generator().manual_seed(3))

    def features(self, text):
        """Of all tokens but the last, [n - 1, 2 * SIZE]."""
        return torch.stack([self.table[a, b] for a, b in zip([0, *text], text[:-1], strict=False)])


class Reference(Dense):
    def features(self, text):
        return self.linear(self.target.features(text), "fc")


def head_of(weights, **settings):
    config = HeadConfig(
        fused=True,
        hidden_layers=IDS,
        target_hidden_size=SIZE,
        hidden_size=D,
        intermediate_size=INTER,
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        vocab_size=V,
        draft_vocab_size=len(weights["lm_head.weight"]),
        inv_freq=THETA ** -(torch.arange(0, DIM, 2) / DIM),
        eps=EPS,
        **settings,
    )
    ids = torch.arange(config.draft_vocab_size) + weights["d2t"] if "d2t" in weights else None
    head = Head(config, weights, ids)
    for name, _ in list(head.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        value = nn.Parameter(weights[name], requires_grad=False)
        setattr(head.get_submodule(owner), leaf, value)
    return head


class Texts:
    """Rows whose tokens, accepted paths and pauses are random."""

    def __init__(self, drafter, target, lens, seed):
        self.drafter, self.target = drafter, target
        self.g = torch.Generator().manual_seed(seed)
        self.rows = [self.draw(n + 1) for n in lens]
        width = max(lens)
        features = torch.full((len(lens), width, len(IDS) * SIZE), float("nan"))
        for b, row in enumerate(self.rows):
            features[b, : len(row) - 1] = target.features(row)
        drafter.begin(*self.buffers(), features)

    def draw(self, n, low=1):
        return torch.randint(low, V, (n,), generator=self.g).tolist()

    def buffers(self):
        tokens = torch.zeros(len(self.rows), max(map(len, self.rows)) + 5, dtype=torch.int32)
        for b, row in enumerate(self.rows):
            tokens[b, : len(row)] = torch.tensor(row)
        return tokens, torch.tensor([len(row) for row in self.rows], dtype=torch.int32)

    def step(self, nodes, depth):
        """Proposes, then commits a random path of a window of nine slots."""
        before = [list(row) for row in self.rows]
        tree = self.drafter.propose(*self.buffers(), None, nodes, depth)
        features = torch.full((len(nodes), 9, len(IDS) * SIZE), float("nan"))
        path = torch.full((len(nodes), 9), -1, dtype=torch.int32)
        kept = [int(torch.randint(1, 6, (), generator=self.g)) if n else 0 for n in nodes]
        for b, n in enumerate(kept):
            if n:
                slots = torch.randperm(8, generator=self.g)[: n - 1].sort().values + 1
                path[b, :n] = torch.cat([torch.zeros(1), slots])
                self.rows[b] += self.draw(n)
                features[b, path[b, :n].long()] = self.target.features(self.rows[b])[-n:]
        self.drafter.commit(Decision(path, [max(n - 1, 0) for n in kept], kept), features)
        return before, tree


def paths(tree, b):
    found = {0: ()}
    for slot in range(1, int(tree.num_nodes[b])):
        found[slot] = (*found[int(tree.parents[b, slot])], int(tree.draft_token_ids[b, slot]))
    return [path for slot, path in found.items() if slot]


def run_of(weights, **settings):
    return HeadRun(head_of(weights, **settings), 4, 300, CPU, DraftCost(0.1))


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("drafted", [None, 20])
@torch.no_grad()
def test_rows_that_pause_and_end(topk, drafted):
    """C17: depths of 0 to 4, side by side; row 3 ends after ten steps, row 2 waits for twelve."""
    target = Target()
    weights = head_weights(target, ids=IDS, drafted=drafted)
    reference = Reference(target, weights, IDS)
    texts = Texts(EagleDrafter(run_of(weights), topk=topk), target, (1, 9, 4, 30), seed=topk)
    checked = 0
    for i in range(26):
        nodes = [5, 1 if i % 3 else 4, 5 if i >= 12 else 1, 0 if i >= 10 else 3]
        depth = [[4, 2, 0][i % 3], 4, 3, 2]
        before, tree = texts.step(nodes, depth)
        assert tree.num_nodes.tolist()[3] == (0 if i >= 10 else 3)
        for b, text in enumerate(before):
            limit = min(nodes[b] - 1, depth[b])
            if topk == 1:
                chain = reference.chain(text, max(limit, 0))
                expected = [tuple(chain[: n + 1]) for n in range(len(chain))]
            else:
                size = nodes[b] - 1 if limit > 0 else 0
                expected = list(reference.tree(text, topk, max(size, 0), max(limit, 0)))
            assert sorted(paths(tree, b)) == sorted(expected)
            checked += len(expected) > 0
    assert checked > 50


@torch.no_grad()
def test_what_a_row_has_read_is_true_and_level():
    """Behind every step the cache holds no guess: a slot for every hidden state that came."""
    target = Target()
    run = run_of(head_weights(target, ids=IDS))
    texts = Texts(EagleDrafter(run), target, (1, 9, 4, 30), seed=5)
    for _ in range(10):
        before, _ = texts.step([5] * 4, [4] * 4)
        assert run.kv.lens == [len(row) - 1 for row in before]


@pytest.mark.parametrize("topk", [1, 3])
@torch.no_grad()
def test_the_last_position_of_the_head(topk):
    """Slots 0 .. 24 exist: the last draft of a row is that of the token in slot 24."""
    target = Target()
    weights = head_weights(target, ids=IDS)
    run = run_of(weights, max_positions=25)
    drafter = EagleDrafter(run, topk=topk)
    texts = Texts(drafter, target, (1, 9, 4, 20), seed=2)
    ended = 0
    for _ in range(12):
        confidence = drafter.confidence(*texts.buffers())
        before, tree = texts.step([5] * 4, [4] * 4)
        for b, text in enumerate(before):
            room = max(25 - (len(text) - 1) + 1, 0)
            assert (confidence[b] > 0) == (room > 0)
            assert tree.drafted_depth()[b] <= room
            assert topk > 1 or tree.drafted_depth()[b] == min(4, room)
            ended += room == 0
    assert ended > 10
    assert not any(run._unread.counts())


@torch.no_grad()
def test_p_min_and_min_tokens():
    """A chain ends before an unlikely token, and short drafts are dropped."""
    target = Target()
    weights = head_weights(target, ids=IDS)
    reference = Reference(target, weights, IDS)
    texts = Texts(
        EagleDrafter(run_of(weights), p_min=0.7, min_tokens=2), target, (1, 9, 4, 30), seed=2
    )
    seen = set()
    for _ in range(10):
        before, tree = texts.step([5] * 4, [4] * 4)
        for text, drafted in zip(before, tree.drafted_depth(), strict=True):
            likely = 0
            path, given, true = [], [], reference.features(text)
            while likely < 4:
                logits, after = reference.behind(text, true, path, given)
                if logits.softmax(-1).max() < 0.7:
                    break
                likely += 1
                path.append(int(logits.argmax()))
                given.append(after)
            assert drafted == (likely if likely >= 2 else 0)
            seen.add(likely)
    assert {0, 1, 4} <= seen


@torch.no_grad()
def test_more_children_than_draft_tokens():
    target = Target()
    weights = head_weights(target, ids=IDS, drafted=3)
    texts = Texts(EagleDrafter(run_of(weights), topk=8), target, (1, 9, 4, 30), seed=2)
    known = set((torch.arange(3) + weights["d2t"]).tolist())
    for _ in range(4):
        _, tree = texts.step([30] * 4, [3] * 4)
        for b in range(4):
            found = paths(tree, b)
            assert len(found) == len(set(found)) == 29
            assert {token for path in found for token in path} <= known


@pytest.mark.parametrize("topk", [1, 3])
@torch.no_grad()
def test_trees_tell_their_chances(topk):
    """The product of the head's probabilities along a path."""
    target = Target()
    weights = head_weights(target, ids=IDS)
    reference = Reference(target, weights, IDS)
    drafter = EagleDrafter(run_of(weights), topk=topk, tells_chances=True)
    texts = Texts(drafter, target, (1, 9, 4, 30), seed=7)
    for _ in range(3):
        before, tree = texts.step([6, 6, 1, 0], [4, 2, 4, 4])
        for b, text in enumerate(before):
            for slot, path in enumerate(paths(tree, b), 1):
                chance, given = 1.0, []
                for depth, token in enumerate(path):
                    logits, after = reference.behind(
                        text, reference.features(text), list(path[:depth]), given
                    )
                    chance *= float(logits.softmax(-1)[token])
                    given.append(after)
                assert float(tree.chances[b, slot]) == pytest.approx(chance, rel=1e-3)
