"""Drafters for other tokenizers, with toys for models: what they know is a text to spell."""

import pytest
import torch
from small_tokenizers import MAKERS, NASTY, TEXTS, small_tokenizer
from test_drafting_by_model import CPU, Toy

from specdec_kernels.decoding.controller import AcceptanceModel, Controller, CostModel
from specdec_kernels.decoding.loop import Loop
from specdec_kernels.decoding.rows import Rows
from specdec_kernels.decoding.verify import KernelVerifier
from specdec_kernels.drafting.intersection import Intersection, IntersectionDrafter
from specdec_kernels.drafting.text_draft import TextDrafter
from specdec_kernels.drafting.transcript import TextTranslation
from specdec_kernels.drafting.vocabulary import pairs_of
from specdec_kernels.hf.vocabulary import vocabulary_of
from specdec_kernels.metrics import Metrics

VOCABULARIES = {name: vocabulary_of("tokenizer", small_tokenizer(name)) for name in MAKERS}
LOSSLESS = ["bytes", "bytes2", "pieces2"]
WAYS = {"text": TextDrafter, "intersection": IntersectionDrafter}


class Speller(Toy):
    """Continues the text of what it read as `text` does, in the tokens of its tokenizer."""

    def __init__(self, name, text, batch, translation=None, **options):
        super().__init__(batch, **options)
        self.vocabulary, self.text = VOCABULARIES[name], text.encode()
        self.size = len(self.vocabulary.pieces)
        self.ids = self.vocabulary.encode(text)[0]
        ends = [0]
        for i in self.ids:
            ends.append(ends[-1] + len(self.vocabulary.pieces[i]))
        self.token_at = dict(zip(ends[:-1], self.ids, strict=True))
        self.translation = translation
        if isinstance(translation, Intersection):
            self.size = translation.target_size

    def logits(self, text):
        text = list(map(int, text))
        if isinstance(self.translation, Intersection):
            text = self.translation.to_draft(torch.tensor(text)).tolist()
        text = text[len(self.vocabulary.start) :]
        read = b"".join(self.vocabulary.pieces[i] for i in text)
        out = torch.full((len(self.vocabulary.pieces),), -8.0)
        if self.text.startswith(read):
            token = self.token_at.get(len(read))
            if token is None:  # within one of its tokens
                token = next(iter(self.vocabulary.spell(self.text[len(read) :])), 0)
            out[token] = 8.0
        if isinstance(self.translation, Intersection):
            return self.translation.to_target(out)
        return out


def translation(way, target, draft):
    its, own = VOCABULARIES[target], VOCABULARIES[draft]
    sizes = len(its.pieces), len(own.pieces)
    if way == "text":
        return TextTranslation(its, own, {}, {}, sizes)
    return Intersection(its, own, pairs_of(its, own, {}, sizes), {}, sizes, CPU)


def spell(way, target, draft, text, starts, size=6, **options):
    """Row b continues the first starts[b] of the target's tokens; what was written, and counts."""
    between = translation(way, target, draft)
    toy, model = (
        Speller(target, text, len(starts)),
        Speller(draft, text, len(starts), between, **options),
    )
    prompts = [[*toy.vocabulary.start, *toy.ids[:n]] for n in starts]
    rows = Rows(prompts, len(toy.ids) - max(starts), frozenset(), CPU)
    toy.prefill(rows.tokens, rows.prompt_lens)
    verifier, metrics = KernelVerifier(None), Metrics()
    verifier.first(torch.stack([toy.logits(p) for p in prompts]), rows)
    controller = Controller(CostModel(), AcceptanceModel(), fixed=size, largest=48)
    drafter = WAYS[way](model, between)
    Loop(toy.verify, toy.kv, rows, drafter, verifier, controller, metrics).run()
    expected = [toy.ids[n : n + len(new)] for n, new in zip(starts, rows.new, strict=True)]
    assert rows.new == expected
    return metrics, model


PAIRS = [(a, b) for a in LOSSLESS for b in LOSSLESS if a != b]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target, draft", PAIRS)
def test_a_draft_model_that_knows_the_same_is_right(way, target, draft):
    """C18: an error of alignment would cost the drafts behind it."""
    text = "".join((*TEXTS, *NASTY[:-1]))
    metrics, _ = spell(way, target, draft, text, [5, 40, 17])
    print(
        way,
        target,
        draft,
        metrics.num_drafts,
        metrics.num_draft_tokens,
        metrics.acceptance_rate,
        metrics.mean_acceptance_length,
    )
