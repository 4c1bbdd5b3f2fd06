"""SpeculativeConfig: what `patch` can be told. Keys are vLLM's where vLLM has one."""

from __future__ import annotations

import dataclasses
import difflib
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHODS = ("ngram", "none")
LINEAR_MODES = ("auto", "off")


@dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of speculative decoding.

    method: "ngram" (prompt lookup), or "none" (the same loop without drafts).
    num_speculative_tokens: drafted tokens per step; None adapts every step, down to zero.
    max_speculative_tokens: the most that the adaptive choice may draft.
    prompt_lookup_min, prompt_lookup_max: shortest and longest n-gram that counts as a match.
    prompt_lookup_matches: how many different continuations are merged into the draft tree.
    seed: row seeds for sampling, one int (row i gets seed + i) or one per row; None takes them from
        torch's generator, so `torch.manual_seed` governs.
    linear: "auto" runs the model's linear layers through `linear_small_m` in verify forwards where
        that measures faster, "off" leaves them alone.
    """

    method: str = "ngram"
    num_speculative_tokens: int | None = None
    max_speculative_tokens: int = 48
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 16
    prompt_lookup_matches: int = 3
    seed: int | tuple[int, ...] | None = None
    linear: str = "auto"

    def __post_init__(self) -> None:
        _expect_choice("method", self.method, METHODS)
        _expect_choice("linear", self.linear, LINEAR_MODES)
        for name in (
            "num_speculative_tokens",
            "max_speculative_tokens",
            "prompt_lookup_min",
            "prompt_lookup_max",
            "prompt_lookup_matches",
        ):
            value = getattr(self, name)
            if value is None and name == "num_speculative_tokens":
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{name}: expected an integer, got {value!r}")
            if operator.index(value) < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                "prompt_lookup_min: expected at most prompt_lookup_max "
                f"({self.prompt_lookup_max}), got {self.prompt_lookup_min}"
            )
        if self.seed is not None and not isinstance(self.seed, int):
            object.__setattr__(self, "seed", tuple(operator.index(s) for s in self.seed))

    @classmethod
    def make(
        cls, config: SpeculativeConfig | Mapping[str, Any] | None = None, **options: Any
    ) -> SpeculativeConfig:
        """From a config, a dictionary or keywords; keywords win. Unknown keys raise ValueError."""
        if config is None:
            settings: dict[str, Any] = {}
        elif isinstance(config, SpeculativeConfig):
            settings = dataclasses.asdict(config)
        elif isinstance(config, Mapping):
            settings = dict(config)
        else:
            raise TypeError(
                "patch: expected config as a dict or SpeculativeConfig, "
                f"got {type(config).__name__}"
            )
        settings.update(options)
        known = [f.name for f in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
                raise ValueError(
                    f"patch: unknown option {key!r}; the nearest known one is {near!r}"
                )
        given = settings.keys()
        if "prompt_lookup_max" in given and "prompt_lookup_min" not in given:
            low = min(settings["prompt_lookup_max"], cls.prompt_lookup_min)
            settings["prompt_lookup_min"] = low
        if "prompt_lookup_min" in given and "prompt_lookup_max" not in given:
            settings["prompt_lookup_max"] = max(
                settings["prompt_lookup_min"], cls.prompt_lookup_max
            )
        return cls(**settings)


def _expect_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
