"""Verify windows in buffers that stay, padded to powers of two."""

from __future__ import annotations

import pytest
import torch

from specdec_kernels.cache import RaggedKV
from specdec_kernels.hf.buffers import WindowBuffers, bucket_of
from specdec_kernels.tree import DraftTree


@pytest.mark.parametrize("width, bucket", [(1, 1), (2, 2), (3, 4), (5, 8), (33, 64), (65, 128)])
def test_buckets_are_powers_of_two(width, bucket):
    assert bucket_of(width) == bucket


@pytest.mark.parametrize("bucket", [4, 128])
def test_windows_are_padded_as_trees_define_it(bucket):
    kv = RaggedKV(2, 10, torch.device("cpu"))
    kv.set_lens([5, 3])
    buffers = WindowBuffers(kv, bucket)
    buffers.fill(DraftTree.from_lists([[9] * bucket] * 2, [list(range(-1, bucket - 1))] * 2))
    rows, links = [[7, 8, 9], [4]], [[-1, 0, 0], [-1]]
    wanted = DraftTree.from_lists(rows, links, width=bucket)
    for tree in (DraftTree.from_lists(rows, links), wanted):
        buffers.fill(tree)
        for name in ("draft_token_ids", "num_nodes", "tree_mask", "depth"):
            assert torch.equal(getattr(buffers.tree, name), getattr(wanted, name)), name
    assert buffers.places()[:, 0].tolist() == [5, 3]
    assert buffers.position_ids()[:, :4].tolist() == [[5, 6, 6, 0], [3, 0, 0, 0]]
    assert buffers.cache_position()[0] == 5


def test_chains_get_their_mask():
    kv = RaggedKV(1, 10, torch.device("cpu"))
    buffers = WindowBuffers(kv, 4)
    buffers.fill(DraftTree.from_lists([[7, 8, 9]], [[-1, 0, 1]]))
    assert buffers.tree.tree_mask.flatten().tolist() == [1, 3, 7, 8]
    assert buffers.tree.depth.tolist() == [[0, 1, 2, 0]]
