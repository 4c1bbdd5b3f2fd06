"""Reads what speculation did somewhere: our metrics as JSON, or vLLM's as Prometheus text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec_kernels import planner

PROMETHEUS = re.compile(r"^(?:\w+:)?spec_decode_(num_\w+?)(?:_total)?(\{[^}]*\})?\s+(\S+)", re.M)


class Measured(NamedTuple):
    """Means of the steps that drafted. draft_cost: of one drafted token in units of a target
    forward, None where times are unknown."""

    acceptance_rate: float
    num_speculative_tokens: float
    tokens_per_step: float
    draft_cost: float | None


def read(text: str) -> Measured:
    """Raises ValueError when it is neither, or when nothing was drafted."""
    counts = _from_json(text) if text.lstrip().startswith(("{", "[")) else _from_prometheus(text)
    drafts = float(counts.get("num_drafts", 0))
    if drafts <= 0:
        raise ValueError("no drafts were counted: there is nothing to plan with")
    k = float(counts["num_draft_tokens"]) / drafts
    tokens = 1.0 + float(counts["num_accepted_tokens"]) / drafts
    seconds, cost = counts.get("seconds") or {}, None
    if k and seconds.get("verify") and counts.get("num_row_steps"):
        steps = float(counts["num_row_steps"]) / drafts  # for each that drafted
        cost = steps * float(seconds.get("draft", 0.0)) / float(seconds["verify"]) / k
    return Measured(planner.acceptance_rate_of(tokens, k), k, tokens, cost)


def _from_json(text: str) -> Mapping[str, Any]:
    """A snapshot of Metrics, alone or as the value of "metrics"."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    while isinstance(found, dict) and isinstance(found.get("metrics"), dict):
        found = found["metrics"]
    if not isinstance(found, dict) or not found.keys() >= _NEEDED:
        raise ValueError(f"expected an object with {', '.join(sorted(_NEEDED))}")
    return found


def _from_prometheus(text: str) -> Mapping[str, Any]:
    """Counters of all label sets added up."""
    sums: dict[str, float] = {}
    for name, _, value in PROMETHEUS.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    if not sums.keys() >= _NEEDED:
        names = ", ".join(f"spec_decode_{name}" for name in sorted(_NEEDED))
        raise ValueError(f"expected JSON metrics or Prometheus text with {names}")
    return sums


_NEEDED = {"num_drafts", "num_draft_tokens", "num_accepted_tokens"}
