"""Processors that name the allowed tokens, asked once per step about a whole draft tree.

Such a processor is stateless and has, besides `__call__`, a method
`allowed_tokens(input_ids: LongTensor [n, L]) -> IntTensor [n, ceil(V / 32)]`: bit j of word i is
set when token 32 i + j may follow, the layout of xgrammar's bitmasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.decoding.rows import Rows
from specdec_kernels.hf.processors import is_stateless
from specdec_kernels.hf.text import PaddedText
from specdec_kernels.tree import DraftTree

EVERY_TOKEN = -1  # a word with all bits set


def names_allowed_tokens(processor: Any) -> bool:
    return is_stateless(processor) and callable(getattr(processor, "allowed_tokens", None))


class Node(NamedTuple):
    row: int
    slot: int
    drafted: tuple[int, ...]  # tokens on the way from the root


class TreeMasks:
    """`allowed_tokens` of SamplingParams, level by level: all nodes of a level in one call each.

    Nodes that a mask above them rules out are not asked about; they cannot be reached.
    """

    def __init__(self, processors: Sequence[Any], text: PaddedText):
        self.processors = processors
        self.text = text

    def __call__(self, rows: Rows, tree: DraftTree | None, vocab: int) -> Tensor:
        """int32 [B, T, W], or [B, W] for the prompts alone."""
        shape = (len(rows), 1 if tree is None else tree.width, (vocab + 31) // 32)
        words = torch.full(shape, EVERY_TOKEN, dtype=torch.int32, device=rows.tokens.device)
        children: list[Children] = [{}] * len(rows) if tree is None else _children(tree, vocab)
        active = [True] * len(rows) if tree is None else (tree.num_nodes > 0).tolist()
        level = [Node(b, 0, ()) for b, on in enumerate(active) if on]
        while level:
            self._fill(words, level)
            level = _below(level, children, words)
        return words[:, 0] if tree is None else words

    def _fill(self, words: Tensor, level: list[Node]) -> None:
        """Asks about all nodes of one level, once for every length of the text before them."""
        for group in self.text.by_length([node.row for node in level]):
            nodes = [level[i] for i in group]
            rows = sorted({node.row for node in nodes})
            texts = self.text.ids(rows)[[rows.index(node.row) for node in nodes]]
            drafted = texts.new_tensor([node.drafted for node in nodes])
            ids = torch.cat([texts, drafted], 1)
            at = [node.row for node in nodes], [node.slot for node in nodes]
            for processor in self.processors:
                words[at] &= _answer(processor, ids, words.shape[-1])


Children = dict[int, list[tuple[int, int]]]  # by slot: the slots below it and their tokens


def _children(tree: DraftTree, vocab: int) -> list[Children]:
    """Per row, tokens outside the vocabulary left out."""
    tokens, parents = tree.draft_token_ids.tolist(), tree.parents.tolist()
    result: list[Children] = []
    for b, count in enumerate(tree.num_nodes.tolist()):
        below: Children = {}
        for slot in range(1, count):
            if 0 <= tokens[b][slot] < vocab:
                below.setdefault(parents[b][slot], []).append((slot, tokens[b][slot]))
        result.append(below)
    return result


def _below(level: list[Node], children: list[Children], words: Tensor) -> list[Node]:
    """The allowed children of a level's nodes."""
    found = [
        (node.slot, Node(node.row, slot, (*node.drafted, token)))
        for node in level
        for slot, token in children[node.row].get(node.slot, ())
    ]
    if not found:
        return []
    token = torch.tensor([node.drafted[-1] for _, node in found], device=words.device)
    rows, above = [node.row for _, node in found], [slot for slot, _ in found]
    allowed = words[rows, above, token // 32].long() >> (token % 32) & 1
    return [node for (_, node), bit in zip(found, allowed.tolist(), strict=True) if bit]


def _answer(processor: Any, ids: Tensor, width: int) -> Tensor:
    answer = processor.allowed_tokens(ids)
    name, expected = type(processor).__name__, (len(ids), width)
    if not isinstance(answer, Tensor) or answer.dtype != torch.int32 or answer.shape != expected:
        got = (
            f"{tuple(answer.shape)} of {answer.dtype}"
            if isinstance(answer, Tensor)
            else type(answer).__name__
        )
        raise ValueError(f"{name}.allowed_tokens: expected int32 {expected}, got {got}")
    return answer.to(ids.device)
