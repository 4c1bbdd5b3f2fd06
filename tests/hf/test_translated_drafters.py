"""Drafters for other tokenizers, with toys for models: what they know is a text to spell."""

import codecs

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import MAKERS, NASTY, TEXTS, small_tokenizer
from test_drafting_by_model import CPU, Toy

from specdec_kernels.decoding.controller import AcceptanceModel, Controller, CostModel
from specdec_kernels.decoding.loop import Loop
from specdec_kernels.decoding.rows import Rows
from specdec_kernels.decoding.verify import KernelVerifier
from specdec_kernels.drafting.intersection import Intersection, IntersectionDrafter
from specdec_kernels.drafting.text_draft import TextDrafter
from specdec_kernels.drafting.transcript import TextTranslation, Transcript
from specdec_kernels.drafting.vocabulary import Vocabulary, pairs_of
from specdec_kernels.hf.vocabulary import vocabulary_of
from specdec_kernels.metrics import Metrics

VOCABULARIES = {name: vocabulary_of("tokenizer", small_tokenizer(name)) for name in MAKERS}
LOSSLESS = ["bytes", "bytes2", "pieces2"]


class Speller(Toy):
    """Writes on as `text` does, wherever in it that stands which it has read.

    At its tokenizer's own boundaries in its tokens, and within those the longest that fit.
    """

    def __init__(self, name, text, batch, translation=None, **options):
        super().__init__(batch, **options)
        self.vocabulary, self.text = VOCABULARIES[name], text.encode()
        self.translation = translation
        self.size = len(self.vocabulary.pieces)
        if isinstance(translation, Intersection):
            self.size = translation.target_size
        self.ids = self.vocabulary.encode(text)[0]
        self.token_at, end = {}, 0
        for i in self.ids:
            self.token_at[end] = i
            end += len(self.vocabulary.pieces[i])

    def logits(self, text):
        text = torch.tensor(text).long()
        if isinstance(self.translation, Intersection):
            text = self.translation.to_draft(text)
        text = text[len(self.vocabulary.start) :].tolist()
        read = b"".join(self.vocabulary.pieces[i] for i in text)
        out = torch.full((len(self.vocabulary.pieces),), -8.0)
        if self.text.startswith(read):
            token = self.token_at.get(len(read))
            if token is None:
                rest = self.text[len(read) : len(read) + self.vocabulary.longest]
                token = next(iter(self.vocabulary.spell(rest)), 0)
            out[token] = 8.0
        if isinstance(self.translation, Intersection):
            return self.translation.to_target(out)
        return out


def translation(way, its, own):
    sizes = len(its.pieces), len(own.pieces)
    if way == "text":
        return TextTranslation(its, own, {}, {}, sizes)
    return Intersection(its, own, pairs_of(its, own, {}, sizes), {}, sizes, CPU)


def write(toy, drafter, starts, size=6):
    """Row b goes on from the first starts[b] tokens; what all rows wrote, as they should have."""
    prompts = [[*toy.vocabulary.start, *toy.ids[:n]] for n in starts]
    rows = Rows(prompts, len(toy.ids) - max(starts), frozenset(), CPU)
    toy.prefill(rows.tokens, rows.prompt_lens)
    verifier, metrics = KernelVerifier(None), Metrics()
    verifier.first(torch.stack([toy.logits(p) for p in prompts]), rows)
    controller = Controller(CostModel(), AcceptanceModel(), fixed=size, largest=48)
    Loop(toy.verify, toy.kv, rows, drafter, verifier, controller, metrics).run()
    assert rows.new == [toy.ids[n : n + len(new)] for n, new in zip(starts, rows.new, strict=True)]
    return [token for new in rows.new for token in new], metrics


PAIRS = [(a, b) for a in LOSSLESS for b in LOSSLESS if a != b]
TEXT = "".join((*TEXTS, *NASTY[:-1]))


@pytest.mark.parametrize("target, draft", PAIRS)
def test_c18_text_that_both_know_is_nearly_always_right(target, draft):
    """An error of alignment would cost all drafts behind it. The prompt is read once."""
    between = translation("text", VOCABULARIES[target], VOCABULARIES[draft])
    model = Speller(draft, TEXT, 2, between)
    _, metrics = write(Speller(target, TEXT, 2), TextDrafter(model, between), [3, 40])
    assert metrics.acceptance_rate > 0.9 and metrics.mean_acceptance_length > 3.5
    assert len(model.prefills) == 1 and max(map(max, model.windows)) <= 12


def cut_vocabulary(name, every):
    """The same tokens at other ids, without every n-th, and with others besides."""
    its = VOCABULARIES[name]
    left = [piece for i, piece in enumerate(its.pieces) if i % every or len(piece) == 1]
    pieces = [b"no token", *reversed(left), b"nor this"]
    return Vocabulary(pieces, its.encode)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("every", [10**6, 7])
def test_c13_common_tokens_that_both_know_are_always_right(every, topk):
    """Only a token that the draft model lacks ends a draft; it is then read in several."""
    its, own = VOCABULARIES["bytes"], cut_vocabulary("bytes", every)
    between = translation("intersection", its, own)

    class Knowing(Speller):
        def __init__(self):
            super().__init__("bytes", TEXT, 2, between)
            self.vocabulary = own
            self.token_at = {at: between.pairs.get(i, 0) for at, i in self.token_at.items()}

    drafter = IntersectionDrafter(Knowing(), between, topk=topk)
    written, metrics = write(Speller("bytes", TEXT, 2), drafter, [3, 30])
    lacking = sum(token not in between.pairs for token in written)
    assert (lacking > 10) == (every == 7)
    assert metrics.num_row_steps <= len(written) / 7 + lacking + 2


texts = st.text(
    st.one_of(st.sampled_from("ab \t\n0é\u0301日😀\u200d\ufeff▁<>|"), st.characters(codec="utf-8")),
    max_size=60,
)
# Without the names of special tokens: in a text, tokenizers take them for the tokens.
words = st.sampled_from([*"".join(TEXTS).split(" "), *NASTY[:-1], " ", "\n"])


@given(
    st.sampled_from(PAIRS),
    st.lists(st.one_of(words, texts), max_size=12).map("".join),
    st.lists(st.integers(1, 9), min_size=1),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300)), max_size=3),
)
def test_fuzz_transcripts_have_the_text(pair, text, sizes, strangers):
    """In steps of any size, with bytes that are no characters and ids that are no tokens."""
    its, own = (VOCABULARIES[name] for name in pair)
    ids = its.encode(text)[0]
    for at, token in strangers:
        ids.insert(min(at, len(ids)), token if token < 250 else 10**6)
    transcript = Transcript(translation("text", its, own))
    before, step = list(transcript.ids), 0
    while ids[step:]:
        size = sizes[step % len(sizes)]
        unchanged = transcript.add(ids[step : step + size])
        step += size
        assert transcript.ids[:unchanged] == before[:unchanged]
        before = list(transcript.ids)
        known = [i for i in ids[:step] if i < len(its.pieces)]
        written = b"".join(its.pieces[i] for i in known)
        spelled = b"".join(own.pieces[i] for i in transcript.ids[len(own.start) :])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        assert [transcript.ids.count(i) for i in own.start] == [1] * len(own.start)
        assert spelled.decode() == decoder.decode(written)
        assert transcript.pending == decoder.getstate()[0]


@given(st.sampled_from(PAIRS), texts, texts, st.integers(0, 3))
def test_fuzz_drafts_are_what_was_written(pair, before, text, cut):
    """All but a last broken character, in tokens of the target."""
    its = VOCABULARIES[pair[0]]
    ids, written = its.encode(before)[0], text.encode()
    written = written[: max(len(written) - cut, 0)]
    draft = translation("text", its, VOCABULARIES[pair[1]]).as_target(ids[-10:], written)
    spelled = b"".join(its.pieces[i] for i in draft)
    whole = (before.encode() + written).decode("utf-8", "ignore").encode()
    assert spelled == whole[len(before.encode()) :]


@pytest.mark.parametrize("name", LOSSLESS)
def test_increments_give_the_tokens_of_the_whole(name):
    """Where the text is one that tokenizers are made for."""
    its, own = VOCABULARIES["bytes" if name != "bytes" else "pieces2"], VOCABULARIES[name]
    ids = its.encode(TEXT)[0]
    transcript = Transcript(translation("text", its, own))
    for i in range(0, len(ids), 3):
        transcript.add(ids[i : i + 3])
    assert transcript.ids == [*own.start, *own.encode(TEXT)[0]]
