"""How much of a draft is accepted when its weights are read by one convention or another.

A head that is given hidden states of the wrong layers, or a norm too many, drafts badly and says
nothing: only acceptance shows it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import specdec_kernels as sdk
from specdec_kernels.cli.model import quiet_transformers
from specdec_kernels.hf import dflash, eagle, medusa, mtp
from specdec_kernels.hf.draft import Draft
from specdec_kernels.hf.eagle_layouts import layer_ids
from specdec_kernels.hf.features import BEFORE_NORM

Drafter = Draft | eagle.Eagle | medusa.MedusaHeads | mtp.Mtp | dflash.DFlash

LINEAR = "auto"
SHIFTS = (-1, 0, 1)
FEWEST_DRAFTS = 10
STANDARD_ERRORS = 3.0
LEAST_GAIN = 1.05  # in tokens per forward


@dataclass(frozen=True)
class Convention:
    """How weights are read; the defaults are the loader's way.

    shift: added to the ids of hidden states. before_norm: the last layer's output is taken before
    the final norm. flipped: settings of HeadConfig and MtpHead that are the other way round.
    """

    shift: int = 0
    before_norm: bool = False
    flipped: frozenset[str] = frozenset()

    @property
    def has_settings(self) -> bool:
        """Whether config.json can ask for it."""
        return not self.before_norm and "hidden_first" not in self.flipped

    def layers(self, loaded: Sequence[int], last: int) -> tuple[int, ...]:
        """The hidden states, as `FeatureTap` counts them. last: the id behind the final norm."""
        ids = [k + self.shift for k in loaded]
        return tuple(BEFORE_NORM if self.before_norm and k == last else k for k in ids)


@dataclass
class Measurement:
    """accepted: at index i, the share of drafts whose token i + 1 was kept.

    tokens: what was written, prompt by prompt.
    """

    num_drafts: int
    accepted: list[float]
    tokens_per_forward: float
    tokens: list[list[int]]

    def moments(self) -> tuple[float, float]:
        """Mean and variance of the number of accepted tokens of a draft."""
        mean = sum(self.accepted)
        square = sum((2 * i + 1) * share for i, share in enumerate(self.accepted))
        return mean, max(square - mean * mean, 0.0)

    def clearly_above(self, other: Measurement) -> bool:
        """More than chance and more than a trifle."""
        if min(self.num_drafts, other.num_drafts) < FEWEST_DRAFTS:
            return False
        (mean, variance), (least, its) = self.moments(), other.moments()
        error = math.sqrt(variance / self.num_drafts + its / other.num_drafts)
        gain = self.tokens_per_forward / other.tokens_per_forward
        return mean - least > STANDARD_ERRORS * error and gain > LEAST_GAIN


def measure(
    target: Any,
    method: str,
    drafter: Any,
    num_speculative_tokens: int,
    prompts: Sequence[tuple[dict[str, Any], int]],
) -> Measurement:
    """Greedy chains through `generate`. prompts: inputs and how many tokens to write at most."""
    options = dict(method=method, model=drafter, draft_tree_topk=1)
    texts = []
    with sdk.patched(target, num_speculative_tokens=num_speculative_tokens, **options):
        with quiet_transformers():
            for inputs, limit in prompts:
                output = target.generate(**inputs, max_new_tokens=limit, do_sample=False)
                texts.append(output[0, inputs["input_ids"].shape[1] :].tolist())
        counts = sdk.metrics(target).snapshot()
    number, kept = counts["num_drafts"], counts["accepted_per_position"]
    kept += [0] * (num_speculative_tokens - len(kept))
    return Measurement(
        num_drafts=number,
        accepted=[n / max(number, 1) for n in kept],
        tokens_per_forward=counts["mean_acceptance_length"],
        tokens=texts,
    )


class Conventions:
    """The conventions by which a loaded drafter can be read."""

    def __init__(self, drafter: Drafter, target: Any):
        self.drafter, self.target = drafter, target
        self.last: int = target.config.get_text_config().num_hidden_layers
        self.loaded: tuple[int, ...] = ()
        self.settings: dict[str, bool] = {}  # those that may be read wrongly
        self.shifts: tuple[int, ...] = ()  # of the ids of hidden states
        if isinstance(drafter, medusa.MedusaHeads):
            self.loaded = (drafter.hidden_layer,)
        elif isinstance(drafter, dflash.DFlash):
            self.loaded, self.shifts = drafter.network.config.hidden_layers, SHIFTS
        elif isinstance(drafter, eagle.Eagle):
            config = drafter.head.config
            self.loaded = config.hidden_layers
            if config.fused:
                names = ("norm_before_residual", "norm_output")
                self.settings = {name: getattr(config, name) for name in names}
                self.shifts = SHIFTS
        elif isinstance(drafter, mtp.Mtp):
            self.loaded = drafter.head.hidden_layers
            self.settings = {"hidden_first": drafter.head.hidden_first}

    def layers(self, way: Convention) -> tuple[int, ...]:
        return way.layers(self.loaded, self.last)

    def siblings(self, way: Convention) -> Iterator[Convention]:
        """Those that differ from `way` in one thing."""
        for shift in self.shifts:
            ids = [k + shift for k in self.loaded]
            if abs(shift - way.shift) == 1 and all(0 <= k <= self.last for k in ids):
                before_norm = way.before_norm and self.last in ids
                yield dataclasses.replace(way, shift=shift, before_norm=before_norm)
        if self.last in (k + way.shift for k in self.loaded):
            yield dataclasses.replace(way, before_norm=not way.before_norm)
        for name in self.settings:
            yield dataclasses.replace(way, flipped=way.flipped ^ {name})

    def read(self, way: Convention) -> Any:
        """What `patch` takes as `model`."""
        if way == Convention():
            return self.drafter.model if isinstance(self.drafter, Draft) else self.drafter
        layers = self.layers(way)
        if isinstance(self.drafter, medusa.MedusaHeads):
            return medusa.reread(self.drafter, self.target, LINEAR, layers[0])
        if isinstance(self.drafter, dflash.DFlash):
            return dflash.reread(self.drafter, self.target, LINEAR, layers)
        changes = {name: not self.settings[name] for name in way.flipped}
        if isinstance(self.drafter, mtp.Mtp):
            order = {**self.settings, **changes}
            return mtp.reread(self.drafter, self.target, LINEAR, layers[0], **order)
        assert isinstance(self.drafter, eagle.Eagle)
        return eagle.reread(self.drafter, self.target, LINEAR, hidden_layers=layers, **changes)

    def name(self, way: Convention) -> str:
        parts = [f"ids {way.shift:+d}"] if way.shift else []
        parts += ["before the final norm"] if way.before_norm else []
        parts += [f"{name} {str(not self.settings[name]).lower()}" for name in sorted(way.flipped)]
        return ", ".join(parts) or "as loaded"

    def remedy(self, way: Convention, config: dict[str, Any]) -> dict[str, Any]:
        """The settings of config.json, by names with dots, that make the loader read by `way`.

        None can ask for the state before the final norm, and none changes how MTP layers are read.
        """
        if isinstance(self.drafter, mtp.Mtp):
            return {}
        changes: dict[str, Any] = {}
        if way.shift:
            found = layer_ids(config)
            name = found[0].name if found else "eagle_aux_hidden_state_layer_ids"
            ids = found[0].ids if found else self.loaded
            changes[name] = [k + way.shift for k in ids]
        return changes | {name: not self.settings[name] for name in sorted(way.flipped)}


def compare(
    conventions: Conventions, measure: Callable[[Convention], Measurement]
) -> tuple[dict[Convention, Measurement], Convention]:
    """The loader's way, its siblings, and those of a better one; and the best of all.

    The best is the loader's unless another is clearly above it.
    """
    best = Convention()
    measured = {best: measure(best)}
    while True:
        for way in conventions.siblings(best):
            if way not in measured:
                measured[way] = measure(way)
        top = max(measured, key=lambda way: measured[way].tokens_per_forward)
        if not measured[top].clearly_above(measured[best]):
            return measured, best
        best = top
