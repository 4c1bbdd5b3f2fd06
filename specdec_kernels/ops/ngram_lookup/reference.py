"""The specification of ngram_lookup in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_lookup(
    tokens: Tensor,
    lens: Tensor,
    min_n: int,
    max_n: int,
    k: int,
    num_matches: int = 1,
    latest: bool = True,
) -> tuple[Tensor, Tensor]:
    batch = tokens.shape[0]
    draft_token_ids = tokens.new_full((batch, num_matches, k), -1, dtype=torch.int64)
    num = tokens.new_zeros((batch, num_matches), dtype=torch.int32)
    for b in range(batch):
        text = tokens[b, : max(int(lens[b]), 0)]
        drafts = _drafts(text, min_n, max_n, k, latest)
        for i, draft in enumerate(drafts[:num_matches]):
            draft_token_ids[b, i] = torch.tensor(draft)
            num[b, i] = k
    return draft_token_ids, num


def _drafts(text: Tensor, min_n: int, max_n: int, k: int, latest: bool) -> list[tuple[int, ...]]:
    """The different continuations of the text's last tokens, best match first."""
    last = text.numel() - 1
    if last < 1:
        return []
    length = torch.zeros(last, dtype=torch.int64)  # of the match that ends at each position
    alive = torch.ones(last, dtype=torch.bool)
    for j in range(min(max_n, last)):
        alive[:j] = False
        alive[j:] &= text[: last - j].cpu() == text[last - j].cpu()
        length += alive
    ends = (length >= min_n).nonzero().flatten()
    if latest:
        ends = ends.flip(0)
    ends = ends[length[ends].argsort(descending=True, stable=True)]
    offsets = torch.arange(k)
    drafts = [tuple(text[end + 1 + offsets % (last - end)].tolist()) for end in ends]
    return list(dict.fromkeys(drafts))
