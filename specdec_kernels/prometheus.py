"""Metrics under vLLM's names, for Prometheus. Needs prometheus-client (extra `metrics`).

To serve them beside others: `prometheus_client.REGISTRY.register(Collector(metrics(model)))`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily
    from prometheus_client.registry import Collector as _Collector
except ImportError as error:
    raise ImportError(
        "prometheus: prometheus-client is needed: pip install 'specdec-kernels[metrics]'"
    ) from error

if TYPE_CHECKING:
    from specdec_kernels.metrics import Metrics

COUNTERS = {
    "num_drafts": "Verifications of a row with at least one drafted token.",
    "num_draft_tokens": "Drafted tokens, along the longest path of each draft.",
    "num_accepted_tokens": "Drafted tokens that were kept.",
}


class Collector(_Collector):
    """Reads the metrics whenever it is asked."""

    def __init__(self, metrics: Metrics, model_name: str = "") -> None:
        self.metrics, self.model_name = metrics, model_name

    def collect(self) -> Iterator[CounterMetricFamily]:
        counts = self.metrics.snapshot()
        for name, text in COUNTERS.items():
            yield self._family(name, text, {(): counts[name]})
        yield self._family(
            "num_accepted_tokens_per_pos",
            "Drafted tokens that were kept, by their position in the draft.",
            {(str(i),): n for i, n in enumerate(counts["accepted_per_position"])},
            "position",
        )
        yield self._family(
            "num_emitted_tokens", "Tokens that were generated.", {(): counts["num_new_tokens"]}
        )
        yield self._family(
            "seconds",
            "Time spent, by phase of a step.",
            {(phase,): value for phase, value in counts["seconds"].items()},
            "phase",
        )
        for name in ("num_draft_tokens", "num_accepted_tokens"):
            yield self._family(
                f"drafter_{name}",
                f"{COUNTERS[name]} Of one of several combined drafters.",
                {(drafter,): counted[name] for drafter, counted in counts["drafters"].items()},
                "drafter",
            )

    def _family(
        self, name: str, text: str, values: dict[tuple[str, ...], float], *labels: str
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"spec_decode_{name}", text, labels=["model_name", *labels])
        for of, value in values.items():
            family.add_metric([self.model_name, *of], value)
        return family


def exposition(metrics: Metrics, model_name: str = "") -> str:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(Collector(metrics, model_name))
    return generate_latest(registry).decode()
