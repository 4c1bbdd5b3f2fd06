"""Checks without chance: what must never be emitted, and what must change nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec_kernels.testing.decoder import Decoder, Drafts, Verify, Window, propose
from specdec_kernels.testing.report import Check
from specdec_kernels.tree import PADDING_PARENT, Acceptance, SamplingParams

_ROWS = 512


def impossible_drafts(
    name: str, verify: Verify, drafts: Drafts, device: torch.device | str = "cpu"
) -> Check:
    """All slots draft a token of target probability 0, of draft probability from 0 to nearly 1."""
    vocab, token = 6, 3
    g = torch.Generator().manual_seed(1)
    levels = (-math.inf, -200.0, -30.0, 8.0) if drafts.sampled else (0.0,)
    width = len(drafts.parents)
    logits = torch.randn(2, _ROWS, width, vocab, generator=g).to(device)
    parents = torch.tensor(drafts.parents, dtype=torch.int32, device=device).repeat(_ROWS, 1)
    ids = torch.where(parents < 0, 0, token)
    nodes = torch.full_like(parents[:, 0], width)
    logits[0, ..., token] = -math.inf
    sampling = SamplingParams.make(_ROWS, seed=range(_ROWS), position=7, step=3, device=device)
    found = []
    for level in levels:
        logits[1, ..., token] = level
        draft = logits[1].clone() if drafts.sampled else None
        result = verify(logits[0].clone(), ids, parents, nodes, sampling, draft_logits=draft)
        emitted = int((result.output_token_ids == token).any(1).sum())
        if emitted:
            found.append(f"{emitted} of {_ROWS} rows with draft logit {level}")
    return Check.of(name, not found, "emitted in " + "; ".join(found) if found else "")


def seed_alone_decides(name: str, verify: Verify, decoder: Decoder) -> Check:
    """The order of rows, finished neighbours, padding slots and the batch size change nothing."""
    seeds = torch.arange(_ROWS, device=decoder.target.table.device)
    text = decoder.start(seeds, 1)
    window = propose(decoder.drafts, decoder.draft, text, decoder.draw)
    logits = decoder.target.logits(window.before, window.draft_token_ids)
    sampling = text.sampling(decoder.filters, decoder.target.vocab)

    def run(rows: Tensor, nodes: Tensor, extra: int) -> Acceptance:
        some = Window._make(None if field is None else field[rows] for field in window)
        some = _padded(some, extra)
        return verify(
            torch.nn.functional.pad(logits[rows], (0, 0, 0, extra), value=math.nan),
            some.draft_token_ids,
            some.parents,
            nodes,
            sampling.at(rows),
            draft_logits=some.draft_logits,
        )

    nodes = window.num_nodes
    order = torch.randperm(_ROWS, generator=torch.Generator().manual_seed(2)).to(seeds.device)
    cases = {
        "another call": (seeds, nodes, 0),
        "another order": (order, nodes[order], 0),
        "padding slots": (seeds, nodes, 2),
        "finished neighbours": (seeds, torch.where(seeds % 3 == 0, 0, nodes), 0),
        **{f"row {row} alone": (seeds[row : row + 1], nodes[row : row + 1], 0) for row in range(8)},
    }
    expected = run(seeds, nodes, 0)
    wrong = []
    for what, (rows, counts, extra) in cases.items():
        live = (counts > 0).nonzero()[:, 0]
        found = _decisions(run(rows, counts, extra), live, nodes)
        if not all(map(torch.equal, found, _decisions(expected, rows[live], nodes))):
            wrong.append(what)
    return Check.of(name, not wrong, "changed by " + ", ".join(wrong) if wrong else "")


def _decisions(result: Acceptance, rows: Tensor, nodes: Tensor) -> list[Tensor]:
    """What some rows decided, without the slots that a wider window has more."""
    width = int(nodes.max())
    decided = [result.path[:, :width], result.num_accepted, result.output_token_ids[:, :width]]
    return [field[rows] for field in decided]


def _padded(window: Window, extra: int) -> Window:
    """With more slots that no one may look at."""
    rows = len(window.parents)
    ids, parents = window.draft_token_ids, window.parents
    draft = window.draft_logits
    if draft is not None:
        draft = torch.nn.functional.pad(draft, (0, 0, 0, extra), value=math.nan)
    return window._replace(
        draft_token_ids=torch.cat([ids, ids[:, :1].expand(rows, extra)], 1),
        parents=torch.cat([parents, parents.new_full((rows, extra), PADDING_PARENT)], 1),
        draft_logits=draft,
    )
