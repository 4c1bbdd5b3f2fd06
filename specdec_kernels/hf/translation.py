"""How the drafts of a model with another tokenizer become the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_kernels.drafting.intersection import Intersection
from specdec_kernels.drafting.transcript import TextTranslation
from specdec_kernels.drafting.vocabulary import Vocabulary, pairs_of
from specdec_kernels.hf.vocabulary import find_tokenizer, token_names, vocabulary_of

# Embeddings of one tokenizer are padded by up to this much; llama.cpp's bound.
PADDING = 128
STRANGERS = 0.01  # share of tokens that may have other names: some that a model was tuned with
COMMON = 0.9  # share of the target's tokens that the draft model has, from which those suffice


class Wanted(NamedTuple):
    """What the user says. way: "intersection", "text" or None, which chooses.

    chains: whether drafts are deterministic chains, which text can be.
    """

    way: str | None = None
    chains: bool = True
    tokenizer: Any = None
    draft_tokenizer: Any = None


class Side(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary


def vocab_size(model: PreTrainedModel) -> int:
    return model.config.get_text_config().vocab_size


def translation_for(
    model: PreTrainedModel, target: PreTrainedModel, wanted: Wanted, download: bool = False
) -> Intersection | TextTranslation | None:
    """None where both have the same tokenizer: by those given or lying with the models, else by the
    sizes of the vocabularies.

    Raises ValueError where it takes tokenizers that are not there.
    """
    sizes = vocab_size(target), vocab_size(model)
    its = find_tokenizer("tokenizer", target, wanted.tokenizer)
    own = find_tokenizer("draft_tokenizer", model, wanted.draft_tokenizer, download)
    if own is None or its is None:
        asked = (wanted.way, wanted.tokenizer, wanted.draft_tokenizer) != (None, None, None)
        if asked or abs(sizes[0] - sizes[1]) > PADDING:
            missing = "tokenizer" if its is None else "draft_tokenizer"
            raise ValueError(
                f"{missing}: expected one, as none lies with the "
                f"{'target' if its is None else 'draft model'}; the draft model has {sizes[1]} "
                f"tokens, the target {sizes[0]}"
            )
        return None
    if same_names(own, its):
        return None
    return _translation(
        Side(target, its, vocabulary_of("tokenizer", its)),
        Side(model, own, vocabulary_of("draft_tokenizer", own)),
        wanted,
    )


def same_names(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether equal ids have equal names, but for a few."""
    names, others = token_names(one), token_names(other)
    strangers = sum(names[i] != others[i] for i in names.keys() & others.keys())
    return strangers <= STRANGERS * min(len(names), len(others))


def _translation(target: Side, draft: Side, wanted: Wanted) -> Intersection | TextTranslation:
    sizes = vocab_size(target.model), vocab_size(draft.model)
    to_draft, to_target = counterparts(target, draft), counterparts(draft, target)
    mutual = {t: d for t, d in to_draft.items() if to_target.get(d) == t}
    pairs = pairs_of(target.vocabulary, draft.vocabulary, mutual, sizes)
    way = wanted.way
    if way is None:
        share = len(pairs) / max(len(target.vocabulary.ids), 1)
        way = "text" if wanted.chains and share < COMMON else "intersection"
    if way == "text":
        return TextTranslation(target.vocabulary, draft.vocabulary, to_draft, to_target, sizes)
    if not pairs:
        raise ValueError(
            "draft_translation: expected a draft model with some of the target's tokens for "
            "'intersection', got one with none"
        )
    return Intersection(
        target.vocabulary, draft.vocabulary, pairs, to_draft, sizes, target.model.device
    )


def counterparts(one: Side, other: Side) -> dict[int, int]:
    """Special tokens of one tokenizer and those of the other that do the same.

    That have the same name, begin or end texts there too, or end what the model writes.
    """
    names = _specials(other)
    found = {i: names[name] for name, i in _specials(one).items() if name in names}
    for role in ("eos_token_id", "bos_token_id"):
        i, its = getattr(one.tokenizer, role), getattr(other.tokenizer, role)
        if i is not None and its is not None:
            found.setdefault(i, its)
    end = other.tokenizer.eos_token_id
    if end is not None:
        for i in _ends(one.model):
            found.setdefault(i, end)
    return found


def _specials(side: Side) -> dict[str, int]:
    ids = sorted(side.vocabulary.specials)
    return dict(zip(side.tokenizer.convert_ids_to_tokens(ids), ids, strict=True))


def _ends(model: PreTrainedModel) -> Sequence[int]:
    ends = model.generation_config.eos_token_id if model.generation_config else None
    return [] if ends is None else ends if isinstance(ends, (list, tuple)) else [ends]
