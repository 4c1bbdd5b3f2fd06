"""How many tokens the demo asks for, so that it ends in time on a machine of any speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec_kernels.cli import runs
from specdec_kernels.cli.prompts import Prompt

SLOTS = 16  # prompt tokens of a warm-up run
WIDE = 1 + runs.LOOKUP["prompt_lookup_num_tokens"]


class Cost(NamedTuple):
    """Seconds of a plain decoding step, and of each token of a prompt or wide window."""

    step: float
    slot: float


def measure(contest: runs.Contest, input_ids) -> Cost:
    """Warms every method up and times plain decoding on the last SLOTS tokens of a prompt."""
    tail = input_ids[:, -SLOTS:]
    for method in contest.methods:
        contest.run(tail, 4, method)
    first, more = (contest.run(tail, n, "plain") for n in (1, 9))
    step = max(more.seconds - first.seconds, 1e-4) / max(len(more.tokens) - 1, 1)
    return Cost(step, first.seconds / SLOTS)


def seconds(
    prompt: Prompt, prompt_tokens: int, new_tokens: int, cost: Cost, patched: int = 1
) -> float:
    """One run of each method, `patched` of them ours, and the forward that checks the texts."""
    wide = max(cost.step, WIDE * cost.slot)
    token = cost.step + (wide + patched * 1.5 * cost.step) / prompt.tokens_per_forward
    return cost.slot * ((3 + patched) * prompt_tokens + new_tokens) + new_tokens * token


def choose_tokens(
    prompts: Sequence[Prompt],
    lengths: Sequence[int],
    cost: Cost,
    left: float,
    patched: int = 1,
) -> list[int]:
    """New tokens for each prompt: the most that `left` seconds allow for one round of all.

    patched: how many methods of ours there are.
    """
    plans = [
        [round(p.least + part * (p.most - p.least)) for p in prompts]
        for part in (1.0, 0.75, 0.5, 0.25, 0.0)
    ]
    plans += [[round(part * p.least) for p in prompts] for part in (0.8, 0.6, 0.4, 0.25)]
    for plan in plans:
        cells = zip(prompts, lengths, plan, strict=True)
        if sum(seconds(*cell, cost, patched) for cell in cells) <= left:
            return plan
    return plans[-1]
