"""ngram_lookup in Triton: the best matches of each chunk of a text, then the best of those.

A match is one 64-bit number that grows with its rank: its length, then how early it is preferred.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch

CHUNK = 2048  # tokens, or matches, that one block looks at
BLOCK_K = 64  # drafted tokens that are written together


@triton.jit
def _end_of(match, LATEST: tl.constexpr):
    """Position of the last token of a match."""
    low = (match & 0x7FFFFFFF).to(tl.int32)
    return low if LATEST else 0x7FFFFFFF - low


@triton.jit
def _drafted(text_ptr, end, last, j, mask):
    """Token j of the draft of the match that ends at `end`: the text repeats behind its end."""
    return tl.load(text_ptr + end + 1 + j % tl.maximum(last - end, 1), mask, -1)


@triton.jit
def _without(matches, best, text_ptr, last, k, LATEST: tl.constexpr):
    """`matches`, 0 in place of those with the draft of `best`."""
    same = matches > 0
    ends = tl.where(same, _end_of(matches, LATEST), 0)
    end = _end_of(best, LATEST)
    others = tl.max((same & (matches != best)).to(tl.int32), 0)
    j = 0
    while (j < k) & (others > 0):
        same &= _drafted(text_ptr, ends, last, j, same) == _drafted(
            text_ptr, end, last, j, best > 0
        )
        others = tl.max((same & (matches != best)).to(tl.int32), 0)
        j += 1
    return tl.where(same, 0, matches)


@triton.jit
def _write_draft(
    match, text_ptr, last, k, draft_ptr, num_ptr, LATEST: tl.constexpr, BLOCK_K: tl.constexpr
):
    end = tl.where(match > 0, _end_of(match, LATEST), 0)
    for first in range(0, k, BLOCK_K):
        j = first + tl.arange(0, BLOCK_K)
        tokens = _drafted(text_ptr, end, last, j, (j < k) & (match > 0))
        tl.store(draft_ptr + j, tokens.to(tl.int64), j < k)
    tl.store(num_ptr, tl.where(match > 0, k, 0))


@triton.jit
def _write_best(
    matches, text_ptr, last, k, num_matches, best_ptr, draft_ptr, num_ptr, MANY: tl.constexpr,
    LATEST: tl.constexpr, FINAL: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The best matches with different drafts: the drafts themselves, or the matches for later."""
    for i in range(num_matches):
        best = tl.max(matches, 0)
        if FINAL:
            _write_draft(best, text_ptr, last, k, draft_ptr + i * k, num_ptr + i, LATEST, BLOCK_K)
        else:
            tl.store(best_ptr + i, best)
        if MANY:
            matches = _without(matches, best, text_ptr, last, k, LATEST)


@triton.jit(do_not_specialize=["max_len", "min_n", "max_n", "k", "num_matches"])
def _ngram_scan_kernel(
    tokens_ptr, stride_tokens, lens_ptr, best_ptr, draft_ptr, num_ptr, max_len, min_n, max_n, k,
    num_matches, MANY: tl.constexpr, LATEST: tl.constexpr, FINAL: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    chunk, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    text_ptr = tokens_ptr + b * stride_tokens
    last = tl.minimum(tl.load(lens_ptr + b), max_len) - 1
    ends = chunk * CHUNK + tl.arange(0, CHUNK)
    alive = ends < last
    alive &= tl.load(text_ptr + ends, alive, 0) == tl.load(text_ptr + last, last > 0, 0)
    length = alive.to(tl.int32)
    j = 1
    while (j < max_n) & (tl.max(alive.to(tl.int32), 0) > 0):
        alive &= ends >= j
        alive &= tl.load(text_ptr + ends - j, alive, 0) == tl.load(text_ptr + last - j, j < last, 0)
        length += alive.to(tl.int32)
        j += 1
    rank = ends if LATEST else 0x7FFFFFFF - ends
    matches = tl.where(length >= min_n, (length.to(tl.int64) << 32) | rank.to(tl.int64), 0)
    row = b * num_matches
    best_ptr += (b * tl.num_programs(0) + chunk) * num_matches
    _write_best(
        matches, text_ptr, last, k, num_matches, best_ptr, draft_ptr + row * k, num_ptr + row,
        MANY, LATEST, FINAL, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_len", "count", "group", "k", "num_matches"])
def _ngram_merge_kernel(
    tokens_ptr, stride_tokens, lens_ptr, matches_ptr, best_ptr, draft_ptr, num_ptr, max_len, count,
    group, k, num_matches, MANY: tl.constexpr, LATEST: tl.constexpr, FINAL: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    part, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    last = tl.minimum(tl.load(lens_ptr + b), max_len) - 1
    i = tl.arange(0, BLOCK)
    mine = (i < group) & (part * group + i < count)
    matches = tl.load(matches_ptr + b * count + part * group + i, mine, 0)
    row = b * num_matches
    best_ptr += (b * tl.num_programs(0) + part) * num_matches
    _write_best(
        matches, tokens_ptr + b * stride_tokens, last, k, num_matches, best_ptr,
        draft_ptr + row * k, num_ptr + row, MANY, LATEST, FINAL, BLOCK_K,
    )  # fmt: skip


def ngram_lookup(
    tokens: Tensor,
    lens: Tensor,
    min_n: int,
    max_n: int,
    k: int,
    num_matches: int = 1,
    latest: bool = True,
) -> tuple[Tensor, Tensor]:
    """One launch for texts up to CHUNK tokens, else one more per factor CHUNK / num_matches.

    Reads the row's tokens once (4 bytes each), in parallel over chunks; what is read again, to
    tell the length of a match or to compare drafts, is in the cache. Between launches travel
    8 num_matches bytes per chunk.
    """
    batch, size = tokens.shape
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    lens = lens.contiguous()
    draft_token_ids = tokens.new_empty((batch, num_matches, k), dtype=torch.int64)
    num = tokens.new_empty((batch, num_matches), dtype=torch.int32)
    parts = max(triton.cdiv(size, CHUNK), 1)
    best = tokens.new_empty((batch, parts, num_matches), dtype=torch.int64)
    flags = dict(MANY=num_matches > 1, LATEST=latest, BLOCK_K=BLOCK_K, num_warps=4)
    text = (tokens, tokens.stride(0), lens)
    out = (best, draft_token_ids, num, size)
    launch(
        _ngram_scan_kernel,
        (parts, batch),
        tokens,
        *text,
        *out,
        min_n,
        max_n,
        k,
        num_matches,
        FINAL=parts == 1,
        CHUNK=CHUNK,
        **flags,
    )
    while parts > 1:
        matches, count = best, parts * num_matches
        group = CHUNK // num_matches * num_matches  # whole lists
        parts = triton.cdiv(count, group)
        best = matches.new_empty((batch, parts, num_matches))
        launch(
            _ngram_merge_kernel,
            (parts, batch),
            tokens,
            *text,
            matches,
            best,
            *out[1:],
            count,
            group,
            k,
            num_matches,
            FINAL=parts == 1,
            BLOCK=triton.next_power_of_2(min(group, count)),
            **flags,
        )
    return draft_token_ids, num
