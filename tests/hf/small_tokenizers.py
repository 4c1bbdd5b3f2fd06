"""Small tokenizers of every kind that drafts are translated between, trained on a few sentences."""

from __future__ import annotations

import functools
import json

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on under the old oak tree.\n"
    "Speculative decoding drafts several tokens; the target model then verifies them all.",
    "def tokenize(text):\n    return [token for token in text.split() if token]\n\tx = 123 + 45\n",
    "Il était une fois, à Besançon, un garçon qui mangeait déjà des gâteaux. Übermäßig süß!",
    "日本語のテキストと、中文文本。 Привет, мир! Καλημέρα κόσμε. 😀👍🏽 👨‍👩‍👧 naïve café e\u0301",
)
NASTY = (
    "a\tb  c   d\n\n  indented\r\n",
    "😀😀👨‍👩‍👧👍🏽🇫🇷",
    "漢字かな交じり文。",
    "e\u0301\u0302\u0323 o\u0308",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 2,
    " leading and trailing ",
    "\u200b\ufeff\u00a0x",
    "<|end|> </s> <s> [UNK] <0x0A>",
)
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def _byte_level(texts, size, digits=False):
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    single = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([single, split]) if digits else split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|end|>"
    )


def _sentencepiece(prepend):
    """A Unigram model with ▁ for spaces, byte tokens and texts that begin with <s>."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(vocab_size=230, show_progress=False)
    trained.train_from_iterator(TEXTS, trainer)
    scores = {name: -5.0 - 0.01 * i for name, i in trained.get_vocab().items()}
    names = ["<unk>", "<s>", "</s>", *BYTES, *sorted(scores.keys() - {"<unk>"})]
    vocab = [(name, scores.get(name, -20.0)) for name in names]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", 1, 0)] if prepend != "never" else []
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def _shuffled():
    """The tokens of "bytes" at other ids."""
    original = small_tokenizer("bytes").backend_tokenizer
    state = json.loads(original.to_str())
    names = sorted(original.get_vocab(), key=lambda name: (name[::-1], name))
    ids = {name: i for i, name in enumerate(names)}
    state["model"]["vocab"] = {name: ids[name] for name in state["model"]["vocab"]}
    for token in state["added_tokens"]:
        token["id"] = ids[token["content"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        pad_token="<pad>",
        eos_token="<|end|>",
    )


def _words():
    """Whole words, and [UNK] for all others; its decoder puts a space between any two."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]", "[END]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[END]")


def _word_pieces():
    """Lower case without accents: its text is not the one that it was given."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=260, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


MAKERS = {
    "bytes": lambda: _byte_level(TEXTS, 420),
    "bytes2": lambda: _byte_level((TEXTS[0], TEXTS[1]), 360, digits=True),
    "pieces": lambda: _sentencepiece("always"),
    "pieces2": lambda: _sentencepiece("never"),
    "shuffled": _shuffled,
    "words": _words,
    "wordpiece": _word_pieces,
}


@functools.cache
def small_tokenizer(name):
    return MAKERS[name]()


def letters(text):
    """A token per letter, in this order."""
    vocab = {letter: i for i, letter in enumerate(text)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
