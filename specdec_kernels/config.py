"""SpeculativeConfig: what `patch` can be told. Keys are vLLM's where vLLM has one."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

METHODS = ("ngram", "draft_model", "eagle", "eagle3", "medusa", "none")
BY_MODEL = ("draft_model", "eagle", "eagle3", "medusa")
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
LINEAR_MODES = ("auto", "invariant", "off")
OPTIONAL = (
    "num_speculative_tokens",
    "prompt_lookup_matches",
    "draft_tree_topk",
    "draft_tree_depth",
)
MEDUSA_TOPK = 10
RNGS = ("philox", "torch")

Seed = int | tuple[int | None, ...] | None
Choices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of speculative decoding.

    method: "ngram" (prompt lookup), "draft_model" (a smaller model with the same tokenizer),
        "eagle3" or "eagle" (an EAGLE head; "eagle" is EAGLE-1 and 2), "medusa" (Medusa heads), or
        "none" (the same loop without drafts). Without one, `model` decides by what lies there, but
        for "medusa".
    num_speculative_tokens: drafted tokens per step; None adapts every step, down to zero.
    max_speculative_tokens: the most that the adaptive choice may draft.
    prompt_lookup_min, prompt_lookup_max: shortest and longest n-gram that counts as a match.
    prompt_lookup_matches: how many different continuations are merged into the draft tree; 1 drafts
        chains. None: 3, and 1 under linear="invariant", whose promise is one for chains.
    seed: row seeds for sampling, one int (row i gets seed + i) or one per row, None among them for
        rows without; these, and all rows when seed is None, take theirs from torch's generator.
    rng: "philox" draws by row seeds. "torch" draws as plain `generate` does, a `torch.multinomial`
        per token, so that `torch.manual_seed` gives the very same text; batches of one row.
    rule: how sampled text accepts drafts, see `ops.rejection_sample`; "typical" is lossy. Greedy
        decoding and the processors that the kernels do not know are exact under every rule.
    posterior_threshold, posterior_alpha: how much "typical" accepts (Medusa's names).
    linear: "auto" runs the model's linear layers through `linear_small_m` in verify forwards where
        that measures faster, and its RMS norms through `rms_norm`; "off" leaves both alone.
        "invariant" always runs them through the kernels, and computes all else so that a position's
        logits do not depend on how many are computed at once. Then, on one machine and at a fixed
        batch and number of threads, chains give bit for bit the logits that method "none" gives:
        greedy text, and sampled text under the rules "auto" and "coupled" with the same seeds, are
        the same with and without drafts, in 16-bit too. Trees (prompt_lookup_matches above 1) and
        other batches keep the near-tie rule. It costs what torch would have been faster by, two
        more forwards at the start, memory for a second copy of GPT-2's transposed weights, and for
        mixtures of experts most of the gain, as experts and routers compute row by row where their
        weights are not [out, in]. Layers that cannot be helped (quantised, hooked) are named in a
        warning: the promise is off then.
    model: the draft model or EAGLE head: a folder, a Hub id (loaded in the target's dtype), or a
        loaded transformers model. For "medusa" a folder or Hub id with
        medusa_lm_head.safetensors or medusa_lm_head.pt, or such a file.
    draft_sample_method: drafts for sampled text: "greedy" takes the draft model's best token,
        "probabilistic" draws from its distribution at the row's temperature; under rule "coupled"
        with the target's own noise.
    draft_tree_topk: children per token of draft trees; 1 drafts chains. num_speculative_tokens then
        counts the tokens of the whole tree. None: 1; 10 for "medusa", but 1 under rule "block" and
        under linear="invariant".
    draft_tree_depth: levels of draft trees, at most (SGLang's num-steps); None lets
        num_speculative_tokens decide, and the number of Medusa heads.
    draft_min_tokens: drafts of fewer levels are not used (llama.cpp's draft-n-min).
    draft_p_min: a draft ends before a token whose probability is lower (draft-p-min).
    medusa_choices: the tree that Medusa heads draft, in the format of Medusa: for each node the
        ranks of its ancestors and its own, as (0,), (1,), (0, 0). Where fewer tokens are drafted,
        the likeliest of them. None: the likeliest tokens of all trees.
    """

    method: str = "ngram"
    num_speculative_tokens: int | None = None
    max_speculative_tokens: int = 48
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 16
    prompt_lookup_matches: int | None = None
    seed: Seed = None
    rng: str = "philox"
    rule: str = "auto"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    linear: str = "auto"
    model: Any = field(default=None, repr=False)
    draft_sample_method: str = "greedy"
    draft_tree_topk: int | None = None
    draft_tree_depth: int | None = None
    draft_min_tokens: int = 0
    draft_p_min: float = 0.0
    medusa_choices: Choices | None = None

    def __post_init__(self) -> None:
        from specdec_kernels.ops.rejection_sample import RULES

        _expect_choice("method", self.method, METHODS)
        _expect_choice("linear", self.linear, LINEAR_MODES)
        _expect_choice("rng", self.rng, RNGS)
        _expect_choice("rule", self.rule, RULES)
        _expect_choice("draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)
        for name in (
            "num_speculative_tokens",
            "max_speculative_tokens",
            "prompt_lookup_min",
            "prompt_lookup_max",
            "prompt_lookup_matches",
            "draft_tree_topk",
            "draft_tree_depth",
            "draft_min_tokens",
        ):
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise TypeError(f"{name}: expected an integer, got {value!r}")
            least = 0 if name == "draft_min_tokens" else 1
            if operator.index(value) < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                "prompt_lookup_min: expected at most prompt_lookup_max "
                f"({self.prompt_lookup_max}), got {self.prompt_lookup_min}"
            )
        for name in ("posterior_threshold", "posterior_alpha", "draft_p_min"):
            _expect_share(name, getattr(self, name))
        object.__setattr__(self, "seed", normal_seed(self.seed))
        if self.rng == "torch":
            self._expect_nothing_against_torch()
        self._expect_a_draft_model_that_fits()
        self._expect_a_tree_of_heads()

    def _expect_nothing_against_torch(self) -> None:
        if self.rule not in ("auto", "coupled"):
            raise ValueError(
                f"rule: expected auto or coupled with rng='torch', got {self.rule!r}: "
                "the other rules draw random numbers of their own"
            )
        if self.seed is not None:
            raise ValueError(
                f"seed: expected none with rng='torch', got {self.seed!r}: "
                "torch.manual_seed governs it"
            )

    def _expect_a_draft_model_that_fits(self) -> None:
        if (self.model is None) == (self.method in BY_MODEL):
            got = "None" if self.model is None else f"one with method {self.method!r}"
            raise ValueError(f"model: expected one for methods {', '.join(BY_MODEL)}, got {got}")
        cut = self.children_in_draft > 1 or self.draft_p_min > 0
        if self.draft_sample_method == "probabilistic" and cut:
            raise ValueError(
                "draft_sample_method: expected greedy with draft_tree_topk above 1 or draft_p_min "
                "above 0, which choose drafts by their probability, got 'probabilistic'"
            )
        most = self.num_speculative_tokens or self.max_speculative_tokens
        if self.draft_min_tokens > most:
            raise ValueError(
                f"draft_min_tokens: expected at most the {most} tokens that a draft may have, "
                f"got {self.draft_min_tokens}"
            )
        if self.rule == "block" and self.children_in_draft > 1:
            raise ValueError(
                f"draft_tree_topk: expected 1 with rule 'block', got {self.draft_tree_topk}"
            )

    def _expect_a_tree_of_heads(self) -> None:
        if self.method == "medusa" and self.draft_sample_method == "probabilistic":
            raise ValueError(
                "draft_sample_method: expected greedy with method 'medusa', got 'probabilistic'"
            )
        if self.medusa_choices is None:
            return
        if self.method != "medusa":
            raise ValueError(f"medusa_choices: expected method 'medusa', got {self.method!r}")
        if self.draft_tree_topk is not None:
            raise ValueError(
                "draft_tree_topk: expected none with medusa_choices, which say it, "
                f"got {self.draft_tree_topk}"
            )
        choices = normal_choices(self.medusa_choices)
        if self.rule == "block" and len({len(path) for path in choices}) < len(choices):
            raise ValueError(f"medusa_choices: expected a chain with rule 'block', got {choices}")
        object.__setattr__(self, "medusa_choices", choices)

    @property
    def children_in_draft(self) -> int:
        """Children of a token of a draft; `block` and the invariant forward want chains."""
        if self.draft_tree_topk is not None:
            return self.draft_tree_topk
        chains = self.method != "medusa" or self.rule == "block" or self.linear == "invariant"
        return 1 if chains else MEDUSA_TOPK

    @property
    def matches_in_draft(self) -> int:
        """How many continuations a draft merges; `block` and the invariant forward want chains."""
        if self.rule == "block":
            return 1
        default = 1 if self.linear == "invariant" else 3
        return default if self.prompt_lookup_matches is None else self.prompt_lookup_matches

    @classmethod
    def make(
        cls, config: SpeculativeConfig | Mapping[str, Any] | None = None, **options: Any
    ) -> SpeculativeConfig:
        """From a config, a dictionary or keywords; keywords win. Unknown keys raise ValueError."""
        if config is None:
            settings: dict[str, Any] = {}
        elif isinstance(config, SpeculativeConfig):
            settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(cls)}
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
        if settings.get("model") is not None:
            settings.setdefault("method", "draft_model")
        if "prompt_lookup_max" in given and "prompt_lookup_min" not in given:
            low = min(settings["prompt_lookup_max"], cls.prompt_lookup_min)
            settings["prompt_lookup_min"] = low
        if "prompt_lookup_min" in given and "prompt_lookup_max" not in given:
            settings["prompt_lookup_max"] = max(
                settings["prompt_lookup_min"], cls.prompt_lookup_max
            )
        return cls(**settings)


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


def normal_choices(choices: Any) -> Choices:
    """Distinct paths of ranks, closed under prefixes; raises TypeError or ValueError otherwise."""
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Sequence):
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


def _expect_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not 0.0 <= value <= 1.0 or math.isnan(value):
        raise ValueError(f"{name}: expected a number from 0 to 1, got {value}")


def _expect_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
