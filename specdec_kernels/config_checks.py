"""Which values of SpeculativeConfig are possible, alone and together."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdec_kernels.medusa_trees import Paths, named_tree

if TYPE_CHECKING:
    from specdec_kernels.config import SpeculativeConfig

BY_MODEL = ("draft_model", "eagle", "eagle3", "mtp", "medusa", "dflash", "dspark")
ALONE = ("none", "synthetic")
METHODS = ("ngram", "suffix", *BY_MODEL, *ALONE)
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
DRAFT_TRANSLATIONS = ("intersection", "text")
LINEAR_MODES = ("auto", "invariant", "off")
GRAPH_MODES = ("auto", "off")
RNGS = ("philox", "torch")

LEAST = {
    "num_speculative_tokens": 1,
    "max_speculative_tokens": 1,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 1,
    "prompt_lookup_matches": 1,
    "suffix_decoding_max_tree_depth": 2,
    "suffix_decoding_max_cached_requests": 0,
    "suffix_decoding_max_cached_tokens": 1,
    "draft_tree_topk": 1,
    "draft_tree_depth": 1,
    "draft_min_tokens": 0,
}
MAY_BE_NONE = (
    "num_speculative_tokens",
    "prompt_lookup_matches",
    "draft_tree_topk",
    "draft_tree_depth",
)
# What the compiled suffix tree can hold.
MOST = {
    "suffix_decoding_max_tree_depth": 1024,
    "suffix_decoding_max_cached_requests": 1 << 20,
    "suffix_decoding_max_cached_tokens": 1 << 28,
}
SHARES = (
    "posterior_threshold",
    "posterior_alpha",
    "suffix_decoding_min_token_prob",
    "draft_p_min",
    "synthetic_acceptance_rate",
)

Seed = int | tuple[int | None, ...] | None
SizeTable = tuple[tuple[int, int, int], ...]


def check(config: SpeculativeConfig) -> None:
    """Raises TypeError or ValueError, which name the setting, what was expected and what came."""
    from specdec_kernels.ops.rejection_sample import RULES

    _check_method(config.method)
    for name, choices in (
        ("linear", LINEAR_MODES),
        ("graphs", GRAPH_MODES),
        ("rng", RNGS),
        ("rule", RULES),
        ("draft_sample_method", DRAFT_SAMPLE_METHODS),
    ):
        _expect_choice(name, getattr(config, name), choices)
    for name, least in LEAST.items():
        value = getattr(config, name)
        if value is not None or name not in MAY_BE_NONE:
            _expect_integer(name, value, least, MOST.get(name))
    for name in SHARES:
        _expect_share(name, getattr(config, name))
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ValueError(
            "prompt_lookup_min: expected at most prompt_lookup_max "
            f"({config.prompt_lookup_max}), got {config.prompt_lookup_min}"
        )
    if not isinstance(config.compile, bool):
        raise TypeError(f"compile: expected True or False, got {config.compile!r}")
    if config.compile and config.linear == "invariant":
        raise ValueError("compile: expected False with linear='invariant', got True")
    _check_suffix(config)
    _check_draft_model(config)
    _check_translation(config)
    _check_medusa(config)
    _check_rule(config)


def methods_of(method: str) -> tuple[str, ...]:
    """The single methods of a combination, in its order."""
    return tuple(part.strip() for part in re.split(r"[+,]", method))


def _check_method(method: Any) -> None:
    parts = methods_of(method) if isinstance(method, str) else (method,)
    for part in parts:
        _expect_choice("method", part, METHODS)
    if len(set(parts)) < len(parts) or (len(parts) > 1 and not set(ALONE).isdisjoint(parts)):
        raise ValueError(f"method: expected different drafters to combine, got {method!r}")
    if "+" in method and "," in method:
        raise ValueError(
            f"method: expected drafters joined by '+' (merged) or ',' (in order), got {method!r}"
        )


def _check_rule(config: SpeculativeConfig) -> None:
    if config.rng == "torch" and config.rule not in ("auto", "coupled"):
        raise ValueError(
            f"rule: expected auto or coupled with rng='torch', got {config.rule!r}: "
            "the other rules draw random numbers of their own"
        )
    if config.rng == "torch" and config.seed is not None:
        raise ValueError(
            f"seed: expected none with rng='torch', got {config.seed!r}: "
            "torch.manual_seed governs it"
        )
    if config.keeps_outputs and config.rule not in ("auto", "coupled"):
        raise ValueError(
            "rule: expected auto or coupled with a cache of earlier outputs, "
            f"got {config.rule!r}: text drawn with the same seed would decide what is drafted; "
            "suffix_decoding_max_cached_requests=0 keeps no outputs"
        )
    if config.rule == "block" and config.merges:
        raise ValueError(
            f"rule: expected another one than block, which takes chains, with {config.method!r}"
        )


def _check_suffix(config: SpeculativeConfig) -> None:
    factor = config.suffix_decoding_max_spec_factor
    if isinstance(factor, bool) or not isinstance(factor, (int, float)):
        raise TypeError(f"suffix_decoding_max_spec_factor: expected a number, got {factor!r}")
    if not 0.0 <= factor < math.inf:
        raise ValueError(
            f"suffix_decoding_max_spec_factor: expected a number of at least 0, got {factor}"
        )
    if config.suffix_decoding_tree not in (None, True, False):
        raise TypeError(
            "suffix_decoding_tree: expected True, False or None, "
            f"got {config.suffix_decoding_tree!r}"
        )


def _check_draft_model(config: SpeculativeConfig) -> None:
    by_model = [method for method in config.methods if method in BY_MODEL]
    if len(by_model) > 1:
        raise ValueError(f"method: expected one of {', '.join(BY_MODEL)}, got {config.method!r}")
    if by_model and config.model is None and by_model != ["mtp"]:
        raise ValueError(
            f"model: expected a draft model or heads for method {by_model[0]!r}, got None"
        )
    if config.model is not None and not by_model:
        raise ValueError(
            f"model: expected one for methods {', '.join(BY_MODEL)} only, "
            f"got one with method {config.method!r}"
        )
    cut = config.children_in_draft > 1 or config.draft_p_min > 0
    if config.draft_sample_method == "probabilistic" and cut:
        raise ValueError(
            "draft_sample_method: expected greedy with draft_tree_topk above 1 or draft_p_min "
            "above 0, which choose drafts by their probability, got 'probabilistic'"
        )
    if config.draft_min_tokens > config.most_drafted:
        raise ValueError(
            f"draft_min_tokens: expected at most the {config.most_drafted} tokens that a draft may "
            f"have, got {config.draft_min_tokens}"
        )
    if config.rule == "block" and config.children_in_draft > 1:
        raise ValueError(
            f"draft_tree_topk: expected 1 with rule 'block', got {config.draft_tree_topk}"
        )


def _check_translation(config: SpeculativeConfig) -> None:
    for name in ("draft_translation", "tokenizer", "draft_tokenizer"):
        value = getattr(config, name)
        if value is not None and "draft_model" not in config.methods:
            raise ValueError(f"{name}: expected none with method {config.method!r}, got {value!r}")
    way = config.draft_translation
    if way is not None:
        _expect_choice("draft_translation", way, DRAFT_TRANSLATIONS)
    if way == "text" and config.draft_sample_method == "probabilistic":
        raise ValueError(
            "draft_sample_method: expected greedy with draft_translation='text', "
            "got 'probabilistic'"
        )
    if way == "text" and config.children_in_draft > 1:
        raise ValueError(
            "draft_tree_topk: expected 1 with draft_translation='text', "
            f"got {config.draft_tree_topk}"
        )


def _check_medusa(config: SpeculativeConfig) -> None:
    if "medusa" in config.methods and config.draft_sample_method == "probabilistic":
        raise ValueError(
            "draft_sample_method: expected greedy with method 'medusa', got 'probabilistic'"
        )
    choices = config.medusa_choices
    if choices is None:
        return
    if "medusa" not in config.methods:
        raise ValueError(f"medusa_choices: expected method 'medusa', got {config.method!r}")
    if config.draft_tree_topk is not None:
        raise ValueError(
            "draft_tree_topk: expected none with medusa_choices, which say it, "
            f"got {config.draft_tree_topk}"
        )
    if config.rule == "block" and len({len(path) for path in choices}) < len(choices):
        raise ValueError(f"medusa_choices: expected a chain with rule 'block', got {choices}")


def normal_seed(seed: Any) -> Seed:
    """One int, or a tuple with one int or None per row; raises TypeError for anything else."""
    seed = seed.tolist() if hasattr(seed, "tolist") else seed  # tensors and arrays
    several = isinstance(seed, Sequence) and not isinstance(seed, (str, bytes))
    for value in seed if several else [seed]:
        if value is None:
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"seed: expected an integer, one per row or None, got {seed!r}")
        if not -(2**63) <= operator.index(value) < 2**63:
            raise ValueError(f"seed: expected signed 64-bit integers, got {value}")
    if several:
        return tuple(None if s is None else operator.index(s) for s in seed)
    return None if seed is None else operator.index(seed)


def normal_table(table: Any) -> SizeTable:
    """Rising ranges of batch sizes with a number of tokens each; raises ValueError otherwise."""
    name = "num_speculative_tokens_per_batch_size"
    try:
        rows = tuple((first, last, tokens) for first, last, tokens in table)
        numbers = [operator.index(n) for row in rows for n in row if not isinstance(n, bool)]
    except (TypeError, ValueError):
        rows, numbers = (), []
    if not rows or len(numbers) < 3 * len(rows) or max(k for _, _, k in rows) < 1:
        raise ValueError(
            f"{name}: expected [[first size, last size, tokens], ...] with a number of tokens "
            f"above 0, got {table!r}"
        )
    bounds = [bound for first, last, _ in rows for bound in (first - 0.5, last + 0.5)]
    if bounds != sorted(bounds) or min(numbers) < 0 or rows[0][0] < 1:
        raise ValueError(
            f"{name}: expected rising ranges of sizes from 1 on and tokens of at least 0, "
            f"got {table!r}"
        )
    return rows


def normal_choices(choices: Any) -> Paths:
    """Distinct paths of ranks, closed under prefixes; raises TypeError or ValueError otherwise."""
    if isinstance(choices, str):
        return named_tree(choices)
    if isinstance(choices, bytes) or not isinstance(choices, Sequence):
        raise TypeError(f"medusa_choices: expected a list of paths, got {choices!r}")
    paths = set()
    for path in choices:
        ranks = path if isinstance(path, Sequence) and not isinstance(path, (str, bytes)) else ()
        if not ranks or any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in ranks):
            raise ValueError(f"medusa_choices: expected paths of ranks from 0 on, got {path!r}")
        paths.add(tuple(ranks))
    for path in sorted(paths):
        if path[:-1] and path[:-1] not in paths:
            raise ValueError(f"medusa_choices: expected {path[:-1]} too, the parent of {path}")
    if not paths:
        raise ValueError("medusa_choices: expected at least one path, got none")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def _expect_integer(name: str, value: Any, least: int, most: int | None) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if operator.index(value) < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
    if most is not None and operator.index(value) > most:
        raise ValueError(f"{name}: expected at most {most}, got {value}")


def _expect_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not 0.0 <= value <= 1.0 or math.isnan(value):
        raise ValueError(f"{name}: expected a number from 0 to 1, got {value}")


def _expect_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
