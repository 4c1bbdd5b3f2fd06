"""The trees that Medusa's authors chose for their checkpoints, by their names.

Per level the number of children of each node of the level above, trailing zeros left out.
Source: github.com/FasterDecoding/Medusa, medusa_choices.py (Apache-2.0).
"""

from __future__ import annotations

Paths = tuple[tuple[int, ...], ...]

CHILDREN = {
    "mc_sim_7b_63": (
        "10",
        "10 7 3 2 1 1 1 1 1 1",
        "10 3 2 1 1 1 1 1 0 0 2 0 0 0 0 0 0 1",
        "2",
    ),
    "vicuna_7b_stage1_ablation": (
        "10",
        "10 4 2 2 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1",
        "4 1 1 0 0 0 0 0 0 0 1",
    ),
    "vicuna_7b_stage1": (
        "10",
        "10 7 4 3 2 2 1 1 1 1",
        "9 3 2 1 1 1 0 0 0 0 2 0 0 0 0 0 0 1",
        "1",
    ),
    "vicuna_7b_stage2": (
        "10",
        "10 5 2 2 1 1 1 1",
        "9 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1",
        "4 1 1 0 0 0 0 0 0 1",
    ),
    "vicuna_13b_stage1": (
        "10",
        "10 7 4 2 2 1 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 0 1",
        "1",
    ),
    "vicuna_13b_stage2": (
        "10",
        "10 4 2 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 3 1 0 0 1 0 1",
        "4 2 1 0 0 0 0 0 0 0 1 0 0 0 0 0 0 0 0 1",
    ),
    "vicuna_33b_stage1": (
        "10",
        "10 8 5 3 2 2 1 1 1 1",
        "9 3 2 1 1 0 0 0 0 0 2 0 0 0 0 0 0 0 1",
    ),
    "vicuna_33b_stage2": (
        "10",
        "10 5 3 2 1 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 3 1 0 0 0 1",
        "3 1 0 0 0 0 0 0 0 0 1",
    ),
    "zephyr_stage2": (
        "10",
        "10 6 4 2 2 1 1 1",
        "10 4 2 1 1 1 0 0 0 0 2 1 0 0 0 0 1",
        "2 1",
    ),
}


def named_tree(name: str) -> Paths:
    """Its nodes as paths of ranks among siblings, level by level.

    Raises ValueError for a name that is none, listing those that are.
    """
    if name not in CHILDREN:
        raise ValueError(
            f"medusa_choices: expected paths or one of {', '.join(CHILDREN)}, got {name!r}"
        )
    found: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for counts in CHILDREN[name]:
        children = zip(level, map(int, counts.split()), strict=False)
        level = [(*path, rank) for path, count in children for rank in range(count)]
        found += level
    return tuple(found)
