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

    def run(rows: Tensor, extra: int = 0, nodes: Tensor | None = None) -> Acceptance:
        some = _padded(Window._make(None if x is None else x[rows] for x in window), extra)
        target = torch.nn.functional.pad(logits[rows], (0, 0, 0, extra), value=math.nan)
        nodes = some.num_nodes if nodes is None else nodes
        return verify(
            target,
            some.draft_token_ids,
            some.parents,
            nodes,
            sampling.at(rows),
            draft_logits=some.draft_logits,
        )

    expected = run(seeds)
    wrong = []

    def compare(what: str, found: Acceptance, rows: Tensor) -> None:
        width = expected.path.shape[1]
        same = all(
            torch.equal(mine[:, :width] if mine.dim() == 2 else mine, wanted[rows])
            for mine, wanted in zip(found[:3], expected[:3], strict=True)
        )
        if not same:
            wrong.append(what)

    g = torch.Generator().manual_seed(2)
    order = torch.randperm(_ROWS, generator=g).to(seeds.device)
    compare("another call", run(seeds), seeds)
    compare("another order", run(order), order)
    compare("padding slots", run(seeds, extra=2), seeds)
    for row in seeds[:8].split(1):
        compare(f"row {int(row)} alone", run(row), row)
    nodes = torch.where(seeds % 3 == 0, 0, window.num_nodes)
    live = (nodes > 0).nonzero()[:, 0]
    found = run(seeds, nodes=nodes)
    compare("finished neighbours", Acceptance._make(x[live] for x in found), live)
    return Check.of(name, not wrong, "changed by " + ", ".join(wrong) if wrong else "")


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
