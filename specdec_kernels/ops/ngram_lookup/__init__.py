"""Drafts by copying what followed earlier occurrences of the last tokens of the text."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_kernels import native
from specdec_kernels.dispatch import register, triton_kernel, undisturbed
from specdec_kernels.ops._checks import expect
from specdec_kernels.ops.ngram_lookup import reference

__all__ = ["ngram_lookup"]

MAX_MATCHES = 64


def ngram_lookup(
    tokens: Tensor,
    lens: Tensor,
    *,
    min_n: int,
    max_n: int,
    k: int,
    num_matches: int = 1,
    latest: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The `num_matches` best continuations of each row's last tokens, found in the row itself.

    Position `e < len - 1` of the text `tokens[b, :len]` matches with length L when the L tokens
    ending at `e` equal the last L tokens of the text; L counts up to `max_n`, and less than `min_n`
    is no match. The two may overlap; the text's end itself is never a match. Longer is better;
    equal lengths rank latest first (earliest first with `latest=False`). A match drafts the k
    tokens behind `e`; where they run off the end of the text the draft continues periodically with
    period `len - 1 - e`. Of matches with the same k drafted tokens only the best counts.

    Args:
        tokens: int32 [B, S]; slots at and beyond `lens` are not read.
        lens: tokens in each row, int32 [B]; rows of 0 or 1 tokens have no match, more than S
            counts as S.
        min_n, max_n: shortest and longest match, 1 <= min_n <= max_n.
        k: drafted tokens per match, at least 1.
        num_matches: m, 1 to 64.
        latest: which of equally long matches is better.
        backend: reference, cpu, triton or cuda; None picks.

    Returns:
        draft_token_ids: int64 [B, m, k], best match first, -1 where there is none.
        num: int32 [B, m], k for a match and 0 where there is none.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Equivalent to::

        for b in range(B):
            text = tokens[b, : lens[b]].tolist()
            last = len(text) - 1
            def length(e):
                differ = (i for i in range(max_n) if i > e or text[e - i] != text[last - i])
                return next(differ, max_n)
            ends = [e for e in range(last) if length(e) >= min_n]
            ends.sort(key=lambda e: (-length(e), -e if latest else e))
            drafts = [tuple(text[e + 1 + j % (last - e)] for j in range(k)) for e in ends]
            for i, draft in enumerate(list(dict.fromkeys(drafts))[:num_matches]):
                draft_token_ids[b, i], num[b, i] = torch.tensor(draft), k
    """
    op = "ngram_lookup"
    if not 1 <= min_n <= max_n:
        raise ValueError(f"{op}: expected 1 <= min_n <= max_n, got min_n {min_n}, max_n {max_n}")
    if k < 1:
        raise ValueError(f"{op}: expected k of at least 1, got {k}")
    if not 1 <= num_matches <= MAX_MATCHES:
        raise ValueError(f"{op}: expected num_matches from 1 to {MAX_MATCHES}, got {num_matches}")
    if undisturbed(tokens, backend):
        try:
            return native.cpu.ngram_lookup(
                tokens, lens, min_n, max_n, k, num_matches, latest, native.num_threads()
            )
        except (TypeError, ValueError):
            _check(tokens, lens)  # says it better, or all is well but the strides
    else:
        _check(tokens, lens)
    return _op(tokens, lens, min_n, max_n, k, num_matches, latest, backend=backend)


def _check(tokens: Tensor, lens: Tensor) -> None:
    sizes: dict[str, int] = {}
    expect("ngram_lookup", "tokens", tokens, "B, S", (torch.int32,), sizes)
    expect("ngram_lookup", "lens", lens, "B", (torch.int32,), sizes, tokens)


def _cpu(tokens, lens, min_n, max_n, k, num_matches=1, latest=True):
    if tokens.stride(-1) != 1:
        tokens = tokens.contiguous()
    return native.cpu.ngram_lookup(
        tokens, lens.contiguous(), min_n, max_n, k, num_matches, latest, native.num_threads()
    )


def _cuda(tokens, lens, min_n, max_n, k, num_matches=1, latest=True):
    if tokens.stride(-1) != 1:
        tokens = tokens.contiguous()
    drafts, num = _fake(tokens, lens, min_n, max_n, k, num_matches)
    words = native.cuda.ngram_lookup_workspace(*tokens.shape, num_matches)
    workspace = lens.new_zeros(words, dtype=torch.int64)
    native.cuda.ngram_lookup(
        tokens, lens.contiguous(), min_n, max_n, k, num_matches, latest,
        drafts, num, workspace, *native.cuda_launch(tokens),
    )  # fmt: skip
    return drafts, num


def _fake(tokens, lens, min_n, max_n, k, num_matches=1, latest=True):
    batch = tokens.shape[0]
    draft_token_ids = tokens.new_empty((batch, num_matches, k), dtype=torch.int64)
    return draft_token_ids, tokens.new_empty((batch, num_matches), dtype=torch.int32)


_op = register(
    "ngram_lookup",
    "(Tensor tokens, Tensor lens, int min_n, int max_n, int k, int num_matches=1, "
    "bool latest=True, *, str backend='') -> (Tensor, Tensor)",
    {
        "cpu": _cpu,
        "reference": reference.ngram_lookup,
        "triton": triton_kernel("ngram_lookup"),
        "cuda": _cuda,
    },
    _fake,
)
