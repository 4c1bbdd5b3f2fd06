"""KernelVerifier in the loop with sampled drafts: exact under every rule, and its seams."""

import pytest
import torch
from sampling_cases import FALSE_ALARM, chi_square_pvalue

from specdec_kernels.cache import RaggedKV
from specdec_kernels.decoding.controller import AcceptanceModel, Controller, CostModel
from specdec_kernels.decoding.loop import Loop
from specdec_kernels.decoding.rows import Rows
from specdec_kernels.decoding.verify import KernelVerifier, WalkVerifier
from specdec_kernels.metrics import Metrics
from specdec_kernels.tree import DraftTree, SamplingParams

CPU = torch.device("cpu")
V, NEW, BATCH = 5, 4, 6000
VOCAB_MAP = torch.tensor([3, 0, 4, 1])  # the draft's vocabulary has no token 2


def tables(seed=0):
    """Logits after each token: the target's [V, V] and the draft's [V, 4]."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randn(V, V, generator=g) * 1.5
    return target, target[:, VOCAB_MAP] + torch.randn(V, 4, generator=g) * 0.8


class SampledDrafter:
    """Two siblings drawn without replacement with a child each, or a chain of two."""

    hidden_layers = ()

    def __init__(self, table, tree, seed=3):
        self.table, self.tree = table, tree
        self.generator = torch.Generator().manual_seed(seed)

    def begin(self, tokens, lens, features):
        pass

    def confidence(self, tokens, lens):
        return [1] * len(lens)

    def draw(self, after, count):
        q = self.table[after].softmax(-1)
        return VOCAB_MAP[q.multinomial(count, replacement=False, generator=self.generator)]

    def propose(self, tokens, lens, sampling, max_nodes, max_depth):
        assert sampling.temperature.shape == lens.shape
        root = tokens.gather(1, lens[:, None].long() - 1)[:, 0].long()
        first = self.draw(root, 2 if self.tree else 1)
        second = torch.stack([self.draw(f, 1)[:, 0] for f in first.unbind(1)], 1)
        ids = torch.cat([root[:, None], first, second], 1)
        parents = [-1, 0, 0, 1, 2] if self.tree else [-1, 0, 1]
        rows = [
            (row, parents) if nodes and depth >= 2 else (row[:1] if nodes else [], parents[:1])
            for row, nodes, depth in zip(ids.tolist(), max_nodes, max_depth, strict=True)
        ]
        tree = DraftTree.from_lists(
            [row for row, _ in rows],
            [links[: len(row)] for row, links in rows],
            width=ids.shape[1],
        )
        logits = self.table[tree.draft_token_ids]
        return tree._replace(draft_logits=logits, draft_vocab_map=VOCAB_MAP)

    def commit(self, decision, features):
        pass

    def end(self, tokens, lens):
        pass


def run(target, drafter, verifier, first_token=1):
    """NEW tokens of BATCH rows behind a prompt of one token, as codes; and the metrics."""
    rows = Rows([[first_token]] * BATCH, NEW, frozenset(), CPU)
    rows.sync()
    cache, metrics = RaggedKV(BATCH, 16, CPU), Metrics()
    cache.set_lens([1] * BATCH)
    verifier.first(target[torch.full((BATCH,), first_token)], rows)
    controller = Controller(CostModel(), AcceptanceModel(), fixed=4, largest=4)
    loop = Loop(
        lambda tree: (target[tree.draft_token_ids], None),
        cache,
        rows,
        drafter,
        verifier,
        controller,
        metrics,
    )
    loop.run()
    return (torch.tensor(rows.new) * V ** torch.arange(NEW - 1, -1, -1)).sum(1), metrics


def joint(target, first_token=1):
    """Exact probabilities of the NEW tokens."""
    p = target.double().softmax(-1)
    result = p[first_token]
    for _ in range(NEW - 1):
        result = (result.view(-1, V)[:, :, None] * p).flatten()
    return result


def pvalue(codes, probabilities):
    return chi_square_pvalue(codes.bincount(minlength=V**NEW), probabilities)


def sampling(seed=0):
    seeds = torch.randint(2**62, (BATCH,), generator=torch.Generator().manual_seed(seed))
    return SamplingParams.make(BATCH, seed=seeds)


RULES = [
    ("auto", True),
    ("recursive", True),
    ("coupled", True),
    ("recursive", False),
    ("token", False),
    ("block", False),
]


@pytest.mark.parametrize("rule, tree", RULES)
def test_a03_exact_joint_with_sampled_drafts(rule, tree):
    """Siblings without replacement, a draft vocabulary that lacks a token."""
    target, draft = tables()
    codes, metrics = run(target, SampledDrafter(draft, tree), KernelVerifier(sampling(), rule=rule))
    assert pvalue(codes, joint(target)) > FALSE_ALARM
    assert metrics.acceptance_rate > (0.25 if rule == "coupled" else 0.45)


@pytest.mark.parametrize("rule, tree", [r for r in RULES if r[0] != "coupled"])
def test_negative_control_wrong_draft_logits(rule, tree):
    target, draft = tables()

    class Lies(SampledDrafter):
        def propose(self, *args):
            made = super().propose(*args)
            return made._replace(draft_logits=made.draft_logits.flip(-1))

    codes, _ = run(target, Lies(draft, tree), KernelVerifier(sampling(), rule=rule))
    assert pvalue(codes, joint(target)) < FALSE_ALARM


def test_negative_control_steps_that_stand_still():
    """Under `block`, a step that repeats brings the same random numbers again."""
    target, draft = tables()

    class Still(KernelVerifier):
        def at(self, rows):
            found = super().at(rows)
            return found._replace(step=torch.ones_like(found.step))

    codes, _ = run(target, SampledDrafter(draft, False), Still(sampling(), rule="block"))
    assert pvalue(codes, joint(target)) < FALSE_ALARM


def test_walks_ask_for_all_rows_of_a_level_together():
    """Row by row what is kept; an accepted token that ends its row is counted, not committed."""
    logits = torch.nn.functional.one_hot(torch.tensor([[4, 5, 6], [4, 9, 9], [7, 7, 7]]), 10)
    tree = DraftTree.from_lists([[1, 4, 5], [1, 4], [1, 2, 3]], [[-1, 0, 1], [-1, 0], [-1, 0, 1]])
    rows, asked = Rows([[1]] * 3, 9, frozenset([5]), CPU), []

    def pick(chosen, given):
        asked.append(chosen)
        return given.argmax(-1).tolist()

    decision = WalkVerifier(pick).verify(logits.float(), tree, rows)
    assert asked == [[0, 1, 2], [0, 1]]
    assert rows.new == [[4, 5], [4, 9], [7]] and rows.done == [True, False, False]
    assert decision.num_accepted == [2, 1, 0] and decision.num_kept == [2, 2, 1]
    assert decision.path.tolist() == [[0, 1, -1], [0, 1, -1], [0, -1, -1]]
