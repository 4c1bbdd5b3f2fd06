"""Negative controls: samplers with one fault each, all of which the suite must fail."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.ops import _random
from specdec_kernels.testing.checks import FILTERS, ROWS, check_sampler
from specdec_kernels.testing.decoder import Verify, gumbel_draws
from specdec_kernels.testing.plain import plain_verify
from specdec_kernels.testing.report import Report
from specdec_kernels.tree import Acceptance, SamplingParams

_sound: Verify = partial(plain_verify, rule="token")


class Control(NamedTuple):
    """What is wrong, the faulty sampler, and the part of the suite that is enough to fail it."""

    fault: str
    verify: Verify
    options: dict[str, Any]

    def run(self, rows: int = ROWS) -> Report:
        filters = {"temperature": FILTERS["temperature"]}
        return check_sampler(self.verify, rows=rows, filters=filters, **self.options)


def warmer_draws(logits: Tensor, sampling: SamplingParams, depth: int, count: int) -> Tensor:
    """Drawn at a draft temperature of which the verifier hears nothing."""
    return gumbel_draws(logits / 1.4, sampling, depth, count)


def frozen_verify(*args: Any, draft_logits: Tensor | None = None) -> Acceptance:
    sampling: SamplingParams = args[-1]
    zeros = torch.zeros_like(sampling.position)
    frozen = (*args[:-1], sampling._replace(position=zeros, step=zeros))
    return _sound(*frozen, draft_logits=draft_logits)


def _chain(fault: str, verify: Verify, **options: Any) -> Control:
    return Control(fault, verify, {"rule": "token", "windows": ["sampled chain"], **options})


NEGATIVE_CONTROLS = {
    "wrong_draft_probabilities": _chain(
        "the verifier takes the draft for less certain than it was",
        partial(plain_verify, rule="token", fault="wrong_draft_probabilities"),
    ),
    "raw_draft_logits": _chain(
        "drafts drawn at a temperature, the raw draft logits handed over",
        _sound,
        draw=warmer_draws,
    ),
    "shared_noise": _chain(
        "drafts drawn with the noise that recovered tokens are drawn with",
        _sound,
        draw=partial(gumbel_draws, stream=_random.RESIDUAL),
    ),
    "frozen_counters": _chain(
        "the same random numbers in every step, as in a graph that replays its seed",
        frozen_verify,
    ),
    "accepts_on_equality": _chain(
        "u q <= p accepts what neither target nor draft can say",
        partial(plain_verify, rule="token", fault="accepts_on_equality"),
    ),
    "stale_siblings": Control(
        "every sibling is held against the whole target, not what the rejected ones left",
        partial(plain_verify, rule="recursive", fault="stale_siblings"),
        {"rule": "recursive", "windows": ["sampled tree"]},
    ),
    "position_keyed_block": Control(
        "block verification whose numbers, the draft's too, are counted by position",
        partial(plain_verify, rule="block", fault="position_keyed_block"),
        {"rule": "block", "windows": ["long sampled chain"], "draw": gumbel_draws},
    ),
    "bonus_from_accept_coin": _chain(
        "the bonus token is drawn with the coin that accepted the draft before it",
        partial(plain_verify, rule="token", fault="bonus_from_accept_coin"),
    ),
}
