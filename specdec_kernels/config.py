"""SpeculativeConfig: what `patch` can be told. Keys are vLLM's where vLLM has one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_kernels.config_checks import (
    METHODS,
    Seed,
    SizeTable,
    check,
    methods_of,
    normal_choices,
    normal_seed,
    normal_table,
)
from specdec_kernels.medusa_trees import Paths
from specdec_kernels.spellings import Reading, llama_cpp, sglang, vllm

MARGINAL_TOPK = 10


@dataclass(frozen=True)
class SpeculativeConfig:
    """Settings of speculative decoding.

    method: "ngram" (prompt lookup), "suffix" (by counts of what followed before, in the text and in
        what earlier calls generated), "draft_model" (a smaller model), "eagle3" or "eagle" (an
        EAGLE head; "eagle" is EAGLE-1 and 2), "mtp" (layers for multi-token prediction, from the
        target's checkpoint or from `model`), "medusa" (Medusa heads), "dflash" or "dspark" (a block
        drafter of that kind), "synthetic" (in a prompt's second run, drafts from its first that
        are right as often as asked for: to measure with), or "none" (the same loop without
        drafts). Without one, `model` decides by what lies there, but for "medusa". Several are
        combined: "suffix+eagle3" merges all drafts for a row into one tree of the likeliest tokens,
        "ngram,draft_model" takes the first that has any.
    num_speculative_tokens: drafted tokens per step; None adapts every step, down to zero.
    num_speculative_tokens_per_batch_size: [[first, last, tokens], ...]: instead, so many while
        first to last rows are running; 0 drafts nothing.
    max_speculative_tokens: the most that the adaptive choice may draft.
    prompt_lookup_min, prompt_lookup_max: shortest and longest n-gram that counts as a match.
    prompt_lookup_matches: how many different continuations are merged into the draft tree; 1 drafts
        chains. None: 3, and 1 under linear="invariant", whose promise is one for chains.
    suffix_decoding_max_tree_depth: longest n-gram that is counted: a match and its draft together.
    suffix_decoding_max_cached_requests: how many outputs of earlier calls are kept, the oldest
        leaving first; 0 keeps none. With any, sampling takes the rule "coupled", and no other.
    suffix_decoding_max_cached_tokens: how many tokens those may have together; about 50 bytes each.
    suffix_decoding_max_spec_factor: drafted tokens per token of the match, at most, but for those
        that are expected to be right once in 50 times or more, about what verifying one costs.
    suffix_decoding_min_token_prob: nothing is drafted that followed more rarely.
    suffix_decoding_tree: draft trees (True) or chains (False). None: trees, and chains under
        linear="invariant". Rule "block" always gets chains.
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
    graphs: "auto" records the verify forwards of a model on a CUDA device as CUDA graphs, one per
        batch and window size (powers of two; a window is padded to the next), and keeps them and
        their cache for later calls; it takes the memory of that cache until `unpatch`. Models that
        cannot be recorded (hooks, a forward that reads values) run as they are, with a warning.
        "off" records nothing.
    compile: runs verify forwards through torch.compile, one compilation per batch and window size,
        whatever the lengths; `linear` then has no effect, as the compiler treats those layers.
    model: the draft model, EAGLE head, MTP layers or block drafter: a folder, a Hub id (loaded in
        the target's dtype), or for "draft_model" a loaded transformers model. None for "mtp" is
        where the target came from. For "medusa" a folder or Hub id with
        medusa_lm_head.safetensors or medusa_lm_head.pt, or such a file.
    draft_translation: how a draft model with another tokenizer drafts. "intersection": tokens that
        both vocabularies have. "text": it writes text in its own tokens, which the target's
        tokenizer encodes; greedy chains only. None: "intersection" where it has 90 % of the
        target's tokens, or where drafts are drawn or branch; else "text".
    tokenizer, draft_tokenizer: the target's and the draft model's (objects, folders or Hub ids),
        where they do not lie with the models.
    draft_sample_method: drafts for sampled text: "greedy" takes the draft model's best token,
        "probabilistic" draws from its distribution at the row's temperature; under rule "coupled"
        with the target's own noise.
    draft_tree_topk: children per token of draft trees; 1 drafts chains. num_speculative_tokens then
        counts the tokens of the whole tree. None: 1; 10 for "medusa" and "dflash", but 1 under rule
        "block", under linear="invariant" and for probabilistic drafts.
    draft_tree_depth: levels of draft trees, at most (SGLang's num-steps); None lets
        num_speculative_tokens decide, and the number of Medusa heads or a block.
    draft_min_tokens: drafts of fewer levels are not used (llama.cpp's draft-n-min).
    draft_p_min: a draft ends before a token whose probability is lower (draft-p-min).
    medusa_choices: the tree that Medusa heads draft, in the format of Medusa: for each node the
        ranks of its ancestors and its own, as (0,), (1,), (0, 0). Where fewer tokens are drafted,
        the likeliest of them. Or the name of a tree of Medusa's, such as "vicuna_7b_stage2". None:
        the likeliest tokens of all trees.
    profile: a file of `save_profile`: the adaptive choice begins with what was learnt about this
        model on this device, not from nothing. One that does not exist yet is as good as none.
    synthetic_acceptance_rate: how often a drafted token of method "synthetic" is right.
    """

    method: str = "ngram"
    num_speculative_tokens: int | None = None
    num_speculative_tokens_per_batch_size: SizeTable | None = None
    max_speculative_tokens: int = 48
    prompt_lookup_min: int = 1
    prompt_lookup_max: int = 16
    prompt_lookup_matches: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_cached_tokens: int = 4_000_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_tree: bool | None = None
    seed: Seed = None
    rng: str = "philox"
    rule: str = "auto"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    linear: str = "auto"
    graphs: str = "auto"
    compile: bool = False
    model: Any = field(default=None, repr=False)
    draft_translation: str | None = None
    tokenizer: Any = field(default=None, repr=False)
    draft_tokenizer: Any = field(default=None, repr=False)
    draft_sample_method: str = "greedy"
    draft_tree_topk: int | None = None
    draft_tree_depth: int | None = None
    draft_min_tokens: int = 0
    draft_p_min: float = 0.0
    medusa_choices: Paths | str | None = None
    profile: str | os.PathLike[str] | None = None
    synthetic_acceptance_rate: float = 0.8

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", normal_seed(self.seed))
        if self.num_speculative_tokens_per_batch_size is not None:
            table = normal_table(self.num_speculative_tokens_per_batch_size)
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", table)
        if self.medusa_choices is not None:
            object.__setattr__(self, "medusa_choices", normal_choices(self.medusa_choices))
        check(self)

    @property
    def methods(self) -> tuple[str, ...]:
        """The single methods, the first preferred."""
        return methods_of(self.method)

    @property
    def merges(self) -> bool:
        """Whether the drafts of several methods become one tree."""
        return "+" in self.method

    @property
    def most_drafted(self) -> int:
        """The most tokens that a step may draft for a row."""
        elsewhere = self.num_speculative_tokens or self.max_speculative_tokens
        return max(
            [elsewhere, *(k for _, _, k in self.num_speculative_tokens_per_batch_size or ())]
        )

    @property
    def keeps_outputs(self) -> bool:
        """Whether drafts may come from what earlier calls generated."""
        return "suffix" in self.methods and self.suffix_decoding_max_cached_requests > 0

    @property
    def suffix_trees(self) -> bool:
        """Whether suffix drafts branch; `block` and the invariant forward want chains."""
        if self.rule == "block":
            return False
        default = self.linear != "invariant"
        return default if self.suffix_decoding_tree is None else self.suffix_decoding_tree

    @property
    def children_in_draft(self) -> int:
        """Children of a token of a draft; `block` and the invariant forward want chains, and so
        do drawn drafts.
        """
        if self.draft_tree_topk is not None:
            return self.draft_tree_topk
        chains = self.rule == "block" or self.linear == "invariant"
        if chains or self.draft_sample_method == "probabilistic":
            return 1
        return MARGINAL_TOPK if {"medusa", "dflash"} & set(self.methods) else 1

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
        """From a config, a dictionary or keywords; keywords win. Unknown keys raise ValueError.

        Dictionaries and keywords may have any key of vLLM's --speculative-config; what is not given
        has the defaults of this class, not vLLM's (see `from_vllm`).
        """
        if config is None:
            base: Mapping[str, Any] = {}
        elif isinstance(config, SpeculativeConfig):
            base = {name: getattr(config, name) for name in cls._fields()}
        elif isinstance(config, Mapping):
            base = config
        else:
            raise TypeError(
                "patch: expected config as a dict or SpeculativeConfig, "
                f"got {type(config).__name__}"
            )
        fields = cls._fields()
        settings = vllm.read_plain(base, options, fields).resolve(fields, METHODS)
        given = frozenset(settings)
        with contextlib.suppress(TypeError):  # a wrong type gets its message from the constructor
            if "prompt_lookup_max" in given and "prompt_lookup_min" not in given:
                low = min(settings["prompt_lookup_max"], cls.prompt_lookup_min)
                settings["prompt_lookup_min"] = low
            if "prompt_lookup_min" in given and "prompt_lookup_max" not in given:
                high = max(settings["prompt_lookup_min"], cls.prompt_lookup_max)
                settings["prompt_lookup_max"] = high
        return cls(**settings)

    @classmethod
    def from_vllm(cls, config: str | Mapping[str, Any]) -> SpeculativeConfig:
        """From vLLM's --speculative-config, JSON text or a dictionary, with vLLM's defaults.

        Options that cannot change what is generated are named in one warning unless they have
        vLLM's default. Raises ValueError for unknown keys, for what would change the output, and
        for methods and options that this version does not have.
        """
        return cls._of(vllm.read(config, cls._fields()))

    @classmethod
    def from_sglang(
        cls, args: str | Sequence[str] | Mapping[str, Any] | object
    ) -> SpeculativeConfig:
        """From SGLang's --speculative options: words of a command line, a shell string, or server
        arguments as a dictionary or object. Other options of the server are skipped; warnings and
        errors as in `from_vllm`.
        """
        return cls._of(sglang.read(args))

    @classmethod
    def from_llama_cpp(cls, args: str | Sequence[str]) -> SpeculativeConfig:
        """From llama.cpp's --spec options: words of a command line or a shell string. Other options
        are skipped; warnings and errors as in `from_vllm`.
        """
        return cls._of(llama_cpp.read(args))

    @classmethod
    def _of(cls, reading: Reading) -> SpeculativeConfig:
        return cls(**reading.resolve(cls._fields(), METHODS))

    @classmethod
    def _fields(cls) -> tuple[str, ...]:
        return tuple(f.name for f in dataclasses.fields(cls))
