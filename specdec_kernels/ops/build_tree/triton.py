"""build_tree in Triton: join equal candidates, rank them, write the window."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.ops._triton import launch

BLOCK_I, BLOCK_J = 32, 128  # candidates that are compared, each with each
RANKED = 16  # per block: keys take twice the registers
NOT_REACHED = tl.constexpr(-2)
INF = tl.constexpr(float("inf"))


@triton.jit
def _on_level(i, level, token_ptr, score_ptr, parent_ptr, level_ptr, canon_ptr, count):
    """Of candidates `i` the token, score and first equal parent, and which are of this level.

    That is, usable ones whose parents are of the level above.
    """
    inside = i < count
    token = tl.load(token_ptr + i, inside, -1)
    score = tl.load(score_ptr + i, inside, -INF)
    parent = tl.load(parent_ptr + i, inside, NOT_REACHED)
    named = (parent >= 0) & (parent < i)
    above = tl.load(level_ptr + parent, named, NOT_REACHED)
    above = tl.where(parent == -1, -1, above)
    here = (token >= 0) & (score > -INF) & (above == level - 1)
    return token, score, tl.load(canon_ptr + parent, here & named, -1), here


@triton.jit
def _rank_key(score, i):
    """Positive, larger for a better score, then for an earlier candidate."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    return ((ordered + 0x80000000) << 31) | (0x7FFFFFFF - i).to(tl.int64)


@triton.jit
def _drafted_slots(max_nodes_ptr, b, width):
    return tl.minimum(tl.load(max_nodes_ptr + b), width) - 1


@triton.jit(do_not_specialize=["count", "width"])
def _join_kernel(
    token_ptr, score_ptr, parent_ptr, max_nodes_ptr, level_ptr, canon_ptr, above_ptr, score_out_ptr,
    key_ptr, found_ptr, count, width, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Level by level, as a candidate's equals are known only once its parents' are."""
    b = tl.program_id(0).to(tl.int64)
    token_ptr += b * count
    score_ptr += b * count
    parent_ptr += b * count
    level_ptr += b * count
    canon_ptr += b * count
    above_ptr += b * count
    score_out_ptr += b * count
    key_ptr += b * count
    used = tl.where(_drafted_slots(max_nodes_ptr, b, width) > 0, count, 0)
    for first in range(0, count, BLOCK_J):
        i = first + tl.arange(0, BLOCK_J)
        tl.store(level_ptr + i, tl.full((BLOCK_J,), NOT_REACHED, tl.int32), i < count)
        tl.store(key_ptr + i, tl.zeros((BLOCK_J,), tl.int64), i < count)
    tl.debug_barrier()
    distinct, level, reached = tl.zeros((), tl.int32), 0, used
    while reached > 0:
        reached = tl.zeros((), tl.int32)
        for first in range(0, used, BLOCK_I):
            i = first + tl.arange(0, BLOCK_I)
            token, best, above, here = _on_level(
                i, level, token_ptr, score_ptr, parent_ptr, level_ptr, canon_ptr, used
            )
            num_here = tl.sum(here.to(tl.int32), 0)
            reached += num_here
            if num_here > 0:
                canon = i
                for other in range(0, used, BLOCK_J):
                    j = other + tl.arange(0, BLOCK_J)
                    token_j, score_j, above_j, here_j = _on_level(
                        j, level, token_ptr, score_ptr, parent_ptr, level_ptr, canon_ptr, used
                    )
                    same = (token[:, None] == token_j[None, :]) & (
                        above[:, None] == above_j[None, :]
                    )
                    same &= here_j[None, :]
                    canon = tl.minimum(canon, tl.min(tl.where(same, j[None, :], used), 1))
                    best = tl.maximum(best, tl.max(tl.where(same, score_j[None, :], -INF), 1))
                roof = tl.load(score_out_ptr + above, here & (above >= 0), INF)
                best = tl.minimum(best, roof)  # no node counts for more than its parent
                is_first = here & (canon == i)
                distinct += tl.sum(is_first.to(tl.int32), 0)
                tl.store(level_ptr + i, level, here)
                tl.store(canon_ptr + i, canon, here)
                tl.store(above_ptr + i, above, here)
                tl.store(score_out_ptr + i, best, here)
                tl.store(key_ptr + i, _rank_key(best, i), is_first)
        tl.debug_barrier()
        level += 1
    tl.store(found_ptr + b, distinct)


@triton.jit(do_not_specialize=["count", "width"])
def _rank_kernel(
    key_ptr, max_nodes_ptr, slot_ptr, order_ptr, count, width, BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):  # fmt: skip
    """A candidate's rank is the number of better ones; the best get slots, 1 for the first."""
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    key_ptr += b * count
    key = tl.load(key_ptr + i, i < count, 0)
    rank = tl.zeros((BLOCK_I,), tl.int32)
    for other in range(0, tl.where(tl.max(key, 0) > 0, count, 0), BLOCK_J):
        j = other + tl.arange(0, BLOCK_J)
        better = tl.load(key_ptr + j, j < count, 0)[None, :] > key[:, None]
        rank += tl.sum(better.to(tl.int32), 1)
    chosen = (key > 0) & (rank < _drafted_slots(max_nodes_ptr, b, width))
    tl.store(slot_ptr + b * count + i, rank + 1, chosen)
    tl.store(order_ptr + b * width + rank, i, chosen)


@triton.jit(do_not_specialize=["count", "width"])
def _window_kernel(
    root_ptr, token_ptr, max_nodes_ptr, above_ptr, slot_ptr, order_ptr, found_ptr, token_out_ptr,
    parent_out_ptr, num_nodes_ptr, mask_ptr, depth_ptr, count, width, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Depths and ancestors by pointer doubling: each round looks twice as far up."""
    b = tl.program_id(0).to(tl.int64)
    drafted = _drafted_slots(max_nodes_ptr, b, width)
    nodes = tl.where(drafted < 0, 0, 1 + tl.minimum(tl.load(found_ptr + b), drafted))
    slot = tl.arange(0, BLOCK)
    inside, is_drafted = slot < width, (slot > 0) & (slot < nodes)
    candidate = tl.load(order_ptr + b * width + slot - 1, is_drafted, 0)
    above = tl.load(above_ptr + b * count + candidate, is_drafted, -1)
    parent = tl.load(slot_ptr + b * count + above, is_drafted & (above >= 0), 0)
    root = tl.load(root_ptr + b)
    token = tl.load(token_ptr + b * count + candidate, is_drafted, 0)
    tl.store(token_out_ptr + b * width + slot, tl.where(is_drafted, token, root), inside)
    shown = tl.where((slot == 0) & (nodes > 0), -1, tl.where(is_drafted, parent, -2))
    tl.store(parent_out_ptr + b * width + slot, shown, inside)
    tl.store(num_nodes_ptr + b, nodes)

    jump = tl.where(is_drafted, parent, slot)
    depth = is_drafted.to(tl.int32)
    far = jump
    for _ in tl.static_range(ROUNDS):
        depth += tl.gather(depth, far, 0)
        far = tl.gather(far, far, 0)
    tl.store(depth_ptr + b * width + slot, depth, inside)
    for word in tl.static_range(WORDS):
        own = (slot >> 6) == word
        bits = tl.where(own, tl.full((BLOCK,), 1, tl.int64) << (slot & 63).to(tl.int64), 0)
        far = jump
        for _ in tl.static_range(ROUNDS):
            bits |= tl.gather(bits, far, 0)
            far = tl.gather(far, far, 0)
        tl.store(mask_ptr + (b * width + slot) * WORDS + word, bits, inside)


def build_tree(
    root_token_ids: Tensor,
    token_ids: Tensor,
    scores: Tensor,
    parents: Tensor,
    max_nodes: Tensor,
    width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Three launches. Reads the candidates' 16 bytes once per level and again for each block of
    those on it; about 40 bytes of scratch per candidate, and the window is written once.

    The time grows with the square of the number of candidates on one level: meant for hundreds.
    """
    batch, count = token_ids.shape
    root_token_ids, token_ids, scores, parents, max_nodes = (
        x.contiguous() for x in (root_token_ids, token_ids, scores, parents, max_nodes)
    )
    words = (width + 63) // 64
    tokens_out = token_ids.new_empty((batch, width))
    parents_out, depth = (parents.new_empty((batch, width)) for _ in range(2))
    num_nodes, found = (parents.new_empty(batch) for _ in range(2))
    mask = token_ids.new_empty((batch, width, words))
    level, canon, above, slot = (torch.empty_like(parents) for _ in range(4))
    best, key, order = (
        torch.empty_like(scores),
        torch.empty_like(token_ids),
        torch.empty_like(depth),
    )
    sizes = dict(BLOCK_I=BLOCK_I, BLOCK_J=BLOCK_J, num_warps=4)
    candidates = (token_ids, scores, parents, max_nodes, level, canon, above, best, key, found)
    launch(_join_kernel, (batch,), parents, *candidates, count, width, **sizes)
    sizes["BLOCK_I"] = RANKED
    blocks = triton.cdiv(count, RANKED)
    launch(
        _rank_kernel, (blocks, batch), parents, key, max_nodes, slot, order, count, width, **sizes
    )
    launch(
        _window_kernel,
        (batch,),
        parents,
        root_token_ids,
        token_ids,
        max_nodes,
        above,
        slot,
        order,
        found,
        tokens_out,
        parents_out,
        num_nodes,
        mask,
        depth,
        count,
        width,
        WORDS=words,
        BLOCK=triton.next_power_of_2(width),
        ROUNDS=max(width - 1, 0).bit_length(),
        num_warps=4,
    )
    return tokens_out, parents_out, num_nodes, mask, depth
