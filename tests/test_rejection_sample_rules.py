"""What each rule promises beyond the target's distribution."""

import math

import pytest
import torch
from helpers import backends
from sampling_cases import is_slow, likely_children, random_window, rows_for

from specdec_kernels.ops.rejection_sample import block_position, reference, rejection_sample
from specdec_kernels.ops.sample import sample
from specdec_kernels.tree import STATUS_NAN, DraftTree, SamplingParams

BACKENDS = backends("rejection_sample")

NATIVE = [b for b in BACKENDS if b != "reference"]
STATISTICAL = [b for b in NATIVE if not is_slow(b)]


def chain(batch, width):
    parents = torch.arange(-1, width - 1, dtype=torch.int32).expand(batch, -1)
    return parents, torch.full((batch,), width, dtype=torch.int32)


def drawn_chain(rows, vocab, drafted, seed, **counters):
    """Target and draft logits, alike in all rows, and chains drawn from the draft."""
    g = torch.Generator().manual_seed(seed)
    target = torch.randn(drafted + 1, vocab, generator=g) * 1.5
    draft = target * 0.5 + torch.randn(target.shape, generator=g)
    sampling = SamplingParams.make(rows, seed=range(rows), **counters)
    ids = torch.zeros(rows, drafted + 1, dtype=torch.int64)
    for depth in range(drafted):
        at = sampling._replace(position=block_position(sampling.step, depth))
        ids[:, depth + 1] = sample(draft[depth].expand(rows, -1), at, stream="draft")
    expand = (rows, drafted + 1, vocab)
    args = (target.expand(expand), ids, *chain(rows, drafted + 1), sampling)
    return args, draft.expand(expand)


def same(results, expected):
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_auto_is_coupled_for_deterministic_drafts_and_recursive_for_drawn_ones(backend):
    args, draft = drawn_chain(rows_for(backend, 60, 8), 12, 3, seed=0)
    for drafts, rule in ((None, "coupled"), (draft, "recursive")):
        expected = rejection_sample(*args, draft_logits=drafts, rule=rule, backend=backend)
        assert same(
            rejection_sample(*args, draft_logits=drafts, rule="auto", backend=backend), expected
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_recursive_on_chains_is_token(backend):
    rows = rows_for(backend, 60, 12)
    args, draft = drawn_chain(rows, 12, 3, seed=1)
    token, recursive = (
        rejection_sample(*args, draft_logits=draft, rule=rule, backend=backend)
        for rule in ("token", "recursive")
    )
    assert same(token, recursive)
    assert 0 < int(token.num_accepted.sum()) < 3 * rows


@pytest.mark.parametrize("backend", STATISTICAL)
@pytest.mark.parametrize("seed", range(3))
def test_block_keeps_more_than_token(backend, seed):
    args, draft = drawn_chain(20_000, 12, 4, seed)
    token, block = (
        rejection_sample(*args, draft_logits=draft, rule=rule, backend=backend)
        for rule in ("token", "block")
    )
    difference = (block.num_accepted - token.num_accepted).double()
    standard_error = float(difference.std()) / math.sqrt(len(difference))
    assert float(difference.mean()) > 5 * standard_error


@pytest.mark.parametrize("backend", BACKENDS)
def test_block_is_counted_by_step(backend):
    args, draft = drawn_chain(rows_for(backend, 50, 8), 12, 3, seed=2, position=5, step=9)
    *window, sampling = args
    first, elsewhere, later = (
        rejection_sample(*window, s, draft_logits=draft, rule="block", backend=backend)
        for s in (
            sampling,
            sampling._replace(position=sampling.position + 1000),
            sampling._replace(step=sampling.step + 1),
        )
    )
    assert same(first, elsewhere)
    assert not same(first, later)


@pytest.mark.parametrize("backend", BACKENDS)
def test_block_ends_before_a_bad_draft_row(backend):
    """The chain is cut in front of its child, and what is left keeps its distribution."""
    args, draft = drawn_chain(rows_for(backend, 40, 8), 12, 3, seed=3)
    target, ids, parents, num_nodes, sampling = args
    draft = draft.clone()
    draft[:, 1] = math.nan
    cut = rejection_sample(*args, draft_logits=draft, rule="block", backend=backend)
    short = rejection_sample(
        target, ids, parents, num_nodes - 2, sampling, draft_logits=draft, rule="block",
        backend=backend,
    )  # fmt: skip
    assert torch.equal(cut.output_token_ids, short.output_token_ids)
    assert (cut.status == STATUS_NAN).all() and not short.status.any()


def posterior(logits, threshold, alpha):
    """Probabilities and Medusa's bound, in fp64."""
    p = torch.softmax(logits.double(), -1)
    entropy = -(p * p.log()).sum(-1)
    return p, torch.minimum((-entropy).exp() * alpha, torch.tensor(threshold).double())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("threshold, alpha", [(0.09, 0.3), (0.3, 0.9)])
def test_typical_keeps_the_deepest_node_that_stands(backend, threshold, alpha):
    g = torch.Generator().manual_seed(4)
    batch, width, vocab = rows_for(backend, 120, 24), 8, 9
    logits = torch.randn(batch, width, vocab, generator=g) * 1.5
    ids, parents, num_nodes = random_window(g, batch, width, vocab)
    ids = likely_children(g, ids, parents, logits.argmax(-1), share=0.4)
    sampling = SamplingParams.make(batch, seed=range(batch))
    result = rejection_sample(
        logits, ids, parents, num_nodes, sampling, rule="typical", backend=backend,
        posterior_threshold=threshold, posterior_alpha=alpha,
    )  # fmt: skip
    p, bound = posterior(logits, threshold, alpha)
    kept = 0
    for b in range(batch):
        paths = {0: [0]} if num_nodes[b] else {}
        for slot in range(1, int(num_nodes[b])):
            parent, token = int(parents[b, slot]), int(ids[b, slot])
            if parent in paths and 0 <= token < vocab and p[b, parent, token] > bound[b, parent]:
                paths[slot] = [*paths[parent], slot]
        best = max(paths.values(), key=lambda path: (len(path), -path[-1]), default=[])
        assert result.path[b][: len(best)].tolist() == best
        assert int(result.num_accepted[b]) == max(len(best) - 1, 0)
        kept += len(best) > 2
    assert kept > batch // 12


@pytest.mark.parametrize("backend", BACKENDS)
def test_typical_draws_the_last_token(backend):
    rows = rows_for(backend, 500, 30)
    logits = torch.randn(rows, 1, 20, generator=torch.Generator().manual_seed(5))
    tree = DraftTree.from_lists([[0]] * rows, [[-1]] * rows)
    sampling = SamplingParams.make(rows, seed=range(rows), position=3)
    result = rejection_sample(logits, *tree[:3], sampling, rule="typical", backend=backend)
    assert torch.equal(result.output_token_ids[:, 0], sample(logits[:, 0], sampling))


@pytest.mark.parametrize("exponent", range(3, 13))
def test_residual_where_the_draft_is_tiny(exponent):
    """A21: max(p - q, 0) in fp32 against fp64, q from 1e-3 to 1e-12 of p."""
    g = torch.Generator().manual_seed(exponent)
    target = torch.softmax(torch.randn(1000, generator=g) * 3, -1)
    draft = target * 10.0**-exponent
    exact = target.double() - draft.double()
    residual = (target - draft).clamp(min=0.0)
    assert float(((residual.double() - exact) / exact).abs().max()) < 1e-6
    scores = reference.residual_scores(residual, target).double()
    assert float(((scores - exact.log()) / exact.log()).abs().max()) < 1e-6
