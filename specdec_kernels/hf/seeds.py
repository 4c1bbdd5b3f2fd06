"""Where the seeds of sampled rows come from."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdec_kernels.config_checks import Seed


def row_seeds(seed: Seed, batch: int) -> list[int]:
    """One seed per row, counted up from an int or as given.

    Rows without one draw it from torch's generator, all in one call, in the order of the rows.
    """
    if isinstance(seed, int):
        return [(seed + b + 2**63) % 2**64 - 2**63 for b in range(batch)]
    given = [None] * batch if seed is None else list(seed)
    if len(given) != batch:
        raise ValueError(f"seed: expected one per row ({batch}), got {len(given)}")
    missing = given.count(None)
    drawn = torch.randint(2**62, (missing,), dtype=torch.int64).tolist() if missing else []
    return [drawn.pop(0) if value is None else value for value in given]


def generator_state(device: torch.device) -> Callable[[], None]:
    """Remembers torch's generators; calling the result puts them back."""
    cpu = torch.get_rng_state()
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        if own is not None:
            torch.cuda.set_rng_state(own, device)

    return restore
