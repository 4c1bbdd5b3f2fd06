"""The drafter that a SpeculativeConfig asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from specdec_kernels.config import SpeculativeConfig
from specdec_kernels.drafting import Drafter
from specdec_kernels.drafting.combined import CombinedDrafter
from specdec_kernels.drafting.dflash import (
    BlockRun,
    DFlashDrafter,
    DSparkDrafter,
    DSparkNetwork,
)
from specdec_kernels.drafting.draft_model import DraftModelDrafter, TranslatedModel
from specdec_kernels.drafting.eagle import EagleDrafter
from specdec_kernels.drafting.intersection import Intersection, IntersectionDrafter
from specdec_kernels.drafting.medusa import Heads, MedusaDrafter
from specdec_kernels.drafting.ngram import NgramDrafter
from specdec_kernels.drafting.none import NoDrafter
from specdec_kernels.drafting.recurrent import RecurrentRun
from specdec_kernels.drafting.suffix import SuffixDrafter
from specdec_kernels.drafting.suffix_cache import SuffixCache, expect_kernels
from specdec_kernels.drafting.synthetic import Recorded, SyntheticDrafter
from specdec_kernels.drafting.text_draft import TextDrafter


class Sources(NamedTuple):
    """What drafters draw on beside the text.

    suffix_cache: what earlier runs generated, for method "suffix"; recorded: the same for
    "synthetic". model: for the methods by model.
    """

    suffix_cache: SuffixCache | None = None
    model: TranslatedModel | RecurrentRun | Heads | BlockRun | None = None
    recorded: Recorded | None = None


NOTHING = Sources()


def make_suffix_cache(config: SpeculativeConfig, vocab_size: int) -> SuffixCache | None:
    """What the runs of one model share; None when `config` wants none.

    Raises ImportError when the method needs compiled kernels that are missing.
    """
    if "suffix" in config.methods:
        expect_kernels()
    if not config.keeps_outputs:
        return None
    return SuffixCache(
        max_depth=config.suffix_decoding_max_tree_depth,
        max_requests=config.suffix_decoding_max_cached_requests,
        max_tokens=config.suffix_decoding_max_cached_tokens,
        vocab_size=vocab_size,
    )


def make_drafter(
    config: SpeculativeConfig,
    eos_token_ids: frozenset[int],
    sources: Sources = NOTHING,
    record: Callable[[str, int, int], None] | None = None,
) -> Drafter:
    """The drafter of one run; rule `block` gets chains. record: see CombinedDrafter."""
    parts = {method: MAKERS[method](config, eos_token_ids, sources) for method in config.methods}
    if len(parts) == 1:
        return parts[config.method]
    return CombinedDrafter(parts, merge=config.merges, record=record)


def _none(config: SpeculativeConfig, eos_token_ids: frozenset[int], sources: Sources) -> Drafter:
    return NoDrafter()


def _ngram(config: SpeculativeConfig, eos_token_ids: frozenset[int], sources: Sources) -> Drafter:
    return NgramDrafter(
        min_n=config.prompt_lookup_min,
        max_n=config.prompt_lookup_max,
        num_matches=config.matches_in_draft,
        max_draft=config.most_drafted,
        eos_token_ids=eos_token_ids,
    )


def _suffix(config: SpeculativeConfig, eos_token_ids: frozenset[int], sources: Sources) -> Drafter:
    return SuffixDrafter(
        max_depth=config.suffix_decoding_max_tree_depth,
        max_draft=config.most_drafted,
        max_spec_factor=config.suffix_decoding_max_spec_factor,
        min_token_prob=config.suffix_decoding_min_token_prob,
        tree=config.suffix_trees,
        cache=sources.suffix_cache,
        eos_token_ids=eos_token_ids,
    )


def _synthetic(
    config: SpeculativeConfig, eos_token_ids: frozenset[int], sources: Sources
) -> Drafter:
    recorded = Recorded() if sources.recorded is None else sources.recorded
    return SyntheticDrafter(recorded, config.synthetic_acceptance_rate, config.most_drafted)


def _by_model(
    config: SpeculativeConfig, eos_token_ids: frozenset[int], sources: Sources
) -> Drafter:
    assert sources.model is not None
    options: dict[str, Any] = dict(
        topk=config.children_in_draft,
        min_tokens=config.draft_min_tokens,
        p_min=config.draft_p_min,
        tells_chances=config.merges,
        eos_token_ids=eos_token_ids,
    )
    if isinstance(sources.model, Heads):
        return MedusaDrafter(sources.model, choices=config.medusa_choices, **options)
    options |= dict(
        rule=config.rule,
        probabilistic=config.draft_sample_method == "probabilistic",
        depth=config.draft_tree_depth,
    )
    if isinstance(sources.model, BlockRun):
        is_dspark = isinstance(sources.model.network, DSparkNetwork)
        return (DSparkDrafter if is_dspark else DFlashDrafter)(sources.model, **options)
    if isinstance(sources.model, RecurrentRun):
        return EagleDrafter(sources.model, **options)
    translation = sources.model.translation
    if isinstance(translation, Intersection):
        return IntersectionDrafter(sources.model, translation, **options)
    if translation is not None:
        return TextDrafter(sources.model, translation, **options)
    return DraftModelDrafter(sources.model, **options)


MAKERS: dict[str, Callable[[SpeculativeConfig, frozenset[int], Sources], Drafter]] = {
    "none": _none,
    "ngram": _ngram,
    "suffix": _suffix,
    "draft_model": _by_model,
    "eagle": _by_model,
    "eagle3": _by_model,
    "medusa": _by_model,
    "dflash": _by_model,
    "dspark": _by_model,
    "mtp": _by_model,
    "synthetic": _synthetic,
}
