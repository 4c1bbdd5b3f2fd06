"""Each op on small inputs, every backend against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_kernels import dispatch, ops
from specdec_kernels.tree import DraftTree, SamplingParams

# How far a float may lie from the reference, relative to the largest value.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = [[3, 5, 7, 5, 9], [2, 4, 6]]
PARENTS = [[-1, 0, 0, 1, 3], [-1, 0, 1]]

Case = Callable[[Callable, str, str], list[Tensor]]


def run() -> list[dict[str, Any]]:
    """One row per op and backend: {"op", "backend", "device", "passed", "detail"}."""
    rows = []
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for name, case in CASES.items():
        op = getattr(ops, name, None)
        for device in devices if op is not None else ():
            for backend in dispatch.IMPLEMENTATIONS[name]:
                if dispatch.why_unavailable(backend, device) is None:
                    rows.append(_run_one(name, op, case, backend, device))
    return rows


def _run_one(name: str, op: Any, case: Case, backend: str, device: str) -> dict[str, Any]:
    row: dict[str, Any] = {"op": name, "backend": backend, "device": device}
    try:
        with torch.inference_mode():
            expected, got = case(op, "reference", device), case(op, backend, device)
        detail = next(filter(None, map(_difference, got, expected)), None)
    except Exception as error:  # whatever goes wrong is what the self-test has to report
        detail = f"{type(error).__name__}: {error}"
    if detail is None:
        detail = "runs" if backend == "reference" else "agrees with the reference"
        return {**row, "passed": True, "detail": detail}
    return {**row, "passed": False, "detail": detail}


def _difference(got: Tensor, expected: Tensor) -> str | None:
    """None when they agree: integers exactly, floats within TOLERANCE."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return (
            f"got {got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}"
        )
    if not got.is_floating_point():
        count = int((got != expected).sum())
        return f"{count} of {got.numel()} integers differ" if count else None
    distance = (got.double() - expected.double()).abs().nan_to_num(nan=float("inf")).max()
    error = float(distance / expected.double().abs().max().clamp(min=1e-30))
    if error <= TOLERANCE[got.dtype]:
        return None
    return f"differs by {error:.1e} of the largest value, allowed {TOLERANCE[got.dtype]:.0e}"


def _random(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def _int32(values: list, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _commit_kv(op: Callable, backend: str, device: str) -> list[Tensor]:
    caches = [_random(2, 2, 24, 10, seed=s, device=device) for s in range(4)]
    path = _int32([[0, 2, 5, -1], [0, 1, 4, 6]], device)
    lens = _int32([3, 11], device)
    op(caches[:2], caches[2:], path, _int32([3, 4], device), lens, backend=backend)
    return caches


def _tree_attention(op: Callable, backend: str, device: str) -> list[Tensor]:
    tree = DraftTree.from_lists(TOKENS, PARENTS, device=device)
    results = []
    for dtype in DTYPES:
        q = _random(2, 5, 4, 16, seed=0, device=device, dtype=dtype)
        k, v = (_random(2, 2, 48, 16, seed=s, device=device, dtype=dtype) for s in (1, 2))
        lens = _int32([37, 20], device)
        for row in range(2):
            end = int(lens[row]) + len(TOKENS[row])
            k[row, :, end:] = v[row, :, end:] = float("nan")
        out, lse = op(
            q, k, v, lens, tree.num_nodes, tree.tree_mask, tree.depth, scale=0.25, backend=backend
        )
        for row, tokens in enumerate(TOKENS):  # padding slots hold anything
            results += [out[row, : len(tokens)], lse[row, :, : len(tokens)]]
    return results


def _window(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits under which some drafts are likely, and the drafted window."""
    tree = DraftTree.from_lists(TOKENS, PARENTS, device=device)
    logits = _random(2, 5, 111, seed=3, device=device, dtype=dtype)
    logits[:, 0, 5] += 4
    logits[:, 1, 5] += 4
    return logits, tree.draft_token_ids, tree.parents, tree.num_nodes


def _sampling(batch: int, device: str) -> SamplingParams:
    return SamplingParams.make(
        batch,
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        seed=list(range(7, 7 + batch)),
        position=12,
        device=device,
    )


def _verify_greedy(op: Callable, backend: str, device: str) -> list[Tensor]:
    return [x for dtype in DTYPES for x in op(*_window(device, dtype), backend=backend)]


def _rejection_sample(op: Callable, backend: str, device: str) -> list[Tensor]:
    logits, ids, parents, num_nodes = _window(device, torch.float32)
    sampling, draft = _sampling(2, device), _random(2, 5, 111, seed=9, device=device)
    chains = torch.arange(-1, 4, dtype=torch.int32, device=device).expand(2, -1)
    penalised = sampling._replace(
        token_ids=torch.tensor([[3, 5, 9]] * 2, device=device),
        token_counts=_int32([[1, 2, -1]] * 2, device),
        repetition_penalty=torch.full((2,), 1.3, device=device),
    )
    results: list[Tensor] = []
    for rule in ("coupled", "recursive", "block", "typical"):
        for drafts, settings in ((None, sampling), (draft, sampling), (None, penalised)):
            window = (logits, ids, chains if rule == "block" else parents, num_nodes)
            results += op(*window, settings, draft_logits=drafts, rule=rule, backend=backend)
    return results


def _sample(op: Callable, backend: str, device: str) -> list[Tensor]:
    logits = _random(64, 111, seed=4, device=device)
    return [op(logits, _sampling(64, device), backend=backend)]


def _topk_logprobs(op: Callable, backend: str, device: str) -> list[Tensor]:
    results = []
    for dtype in DTYPES:
        logits = _random(3, 1000, seed=10, device=device, dtype=dtype)
        results += op(logits, 10, backend=backend)
    return results


def _build_tree(op: Callable, backend: str, device: str) -> list[Tensor]:
    steps = -_random(2, 90, seed=11, device=device).abs()
    token_ids = torch.arange(90, device=device).expand(2, -1) % 37
    parents = torch.arange(-9, 81, device=device).div(9, rounding_mode="floor").int()
    scores = steps.cumsum(1) / 9
    root, max_nodes = token_ids[:, 0], _int32([70, 12], device)
    columns = (root, token_ids, scores, parents.expand(2, -1))
    return list(op(*columns, max_nodes=max_nodes, width=70, backend=backend)[:5])


def _ngram_lookup(op: Callable, backend: str, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 4, (3, 50), generator=generator, dtype=torch.int32).to(device)
    lens = _int32([50, 17, 2], device)
    ids, num = op(tokens, lens, min_n=1, max_n=3, k=6, num_matches=2, backend=backend)
    unused = torch.arange(6, device=device) >= num[..., None]
    return [ids.masked_fill(unused, -1), num]


def _linear_small_m(op: Callable, backend: str, device: str) -> list[Tensor]:
    results = []
    for dtype in DTYPES:
        weight = _random(40, 72, seed=6, device=device, dtype=dtype)
        bias = _random(40, seed=7, device=device, dtype=dtype)
        for rows in (1, 9):
            x = _random(rows, 72, seed=8, device=device, dtype=dtype)
            results.append(op(x, weight, bias, backend=backend))
    return results


def _rms_norm(op: Callable, backend: str, device: str) -> list[Tensor]:
    results = []
    for dtype in DTYPES:
        weight = _random(72, seed=9, device=device, dtype=dtype)
        x = _random(2, 3, 72, seed=10, device=device, dtype=dtype)
        results.append(op(x, weight, eps=1e-5, backend=backend))
    return results


CASES: dict[str, Case] = {
    "tree_attention": _tree_attention,
    "verify_greedy": _verify_greedy,
    "rejection_sample": _rejection_sample,
    "sample": _sample,
    "topk_logprobs": _topk_logprobs,
    "build_tree": _build_tree,
    "ngram_lookup": _ngram_lookup,
    "commit_kv_": _commit_kv,
    "linear_small_m": _linear_small_m,
    "rms_norm": _rms_norm,
}
