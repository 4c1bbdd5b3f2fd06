"""The tokenizers of two models: found, compared, and as drafters that translate need them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specdec_kernels.drafting.vocabulary import Vocabulary

ANCHOR = "a"


def find_tokenizer(
    name: str, model: PreTrainedModel, given: Any = None, download: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that was given as the option `name`, or lies with the model, or None.

    Raises TypeError or ValueError for a given one that is none or cannot be read.
    """
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if given is not None and not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"{name}: expected a tokenizer, a folder or a Hub id, got {given!r}")
    source = model.name_or_path if given is None else os.fspath(given)
    if not source:
        return None
    try:
        local = given is None and not download
        return AutoTokenizer.from_pretrained(source, local_files_only=local)
    except Exception as error:  # whatever keeps it from loading
        if given is None:
            return None
        raise ValueError(
            f"{name}: expected the folder or Hub id of a tokenizer, got {source!r}: {error}"
        ) from error


def token_names(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}


def vocabulary_of(name: str, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """Raises ValueError for a tokenizer of Python code, which the option `name` should replace."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"{name}: expected a fast tokenizer (one with a tokenizer.json), "
            f"got {type(tokenizer).__name__}"
        )
    names = [backend.id_to_token(i) for i in range(1 + max(backend.get_vocab().values()))]
    added = backend.get_added_tokens_decoder()
    pieces = _pieces(backend, names, added.keys())
    specials = {i for i, token in added.items() if token.special} | {*tokenizer.all_special_ids}
    begin = tokenizer.bos_token_id
    begins = begin is not None and tokenizer.encode("")[:1] == [begin]
    if begins:  # where the other model has nothing like it, it is no text
        pieces[begin] = b""

    def encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = backend.encode(text, add_special_tokens=False)
        return found.ids, _spans(text, [pieces[i] for i in found.ids], found.offsets)

    return Vocabulary(
        pieces,
        encode,
        adds_space=b"".join(pieces[i] for i in encode(ANCHOR)[0]) == b" " + ANCHOR.encode(),
        specials=specials,
        spares=[i for i, token in enumerate(names) if _byte_of(token) is not None],
        start=[begin] if begins else [],
    )


def _pieces(backend: Any, names: Sequence[str | None], added: Collection[int]) -> list[bytes]:
    """What each token adds to a text; `added` ones stand outside of the model."""
    decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
    if b'"ByteLevel"' in decoder:
        values = _byte_level()
        return [
            bytes(map(values.__getitem__, name))
            if i not in added and values.keys() >= set(name)
            else name.encode()
            for i, name in enumerate(token or "" for token in names)
        ]
    # Others may decode a first token in another way, as without its space.
    anchor = backend.encode(ANCHOR, add_special_tokens=False).ids[-1:]
    before = backend.decode(anchor, skip_special_tokens=False)
    known = [i for i, token in enumerate(names) if token is not None]
    texts = backend.decode_batch([[*anchor, i] for i in known], skip_special_tokens=False)
    pieces = [b""] * len(names)
    for i, text in zip(known, texts, strict=True):
        byte = _byte_of(names[i]) if b'"ByteFallback"' in decoder else None
        if byte is not None:
            pieces[i] = byte
        elif text.startswith(before):
            pieces[i] = text[len(before) :].encode()
    return pieces


def _byte_level() -> dict[str, int]:
    """The bytes that GPT-2's byte-level tokenizers write as these characters."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    chars = {chr(byte): byte for byte in shown}
    return chars | {chr(256 + i): byte for i, byte in enumerate(hidden)}


def _byte_of(name: str | None) -> bytes | None:
    """The byte that a token such as <0x0A> stands for."""
    if name is None or len(name) != 6 or not name.startswith("<0x"):
        return None
    try:
        return bytes.fromhex(name[3:5])
    except ValueError:
        return None


def _spans(
    text: str, pieces: Sequence[bytes], offsets: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Characters [start, end) of each token: by its bytes, as offsets may leave out spaces.

    A space that the tokenizer adds in front counts for nothing. A tokenizer that changes the text
    is believed.
    """
    chars = [i for i, char in enumerate(text) for _ in char.encode()]
    joined = b"".join(pieces)
    added = len(joined) - len(chars)
    if added not in (0, 1) or joined[added:] != text.encode() or joined[:added].strip():
        return offsets
    spans, end = [], -added
    for piece in pieces:
        start, end = end, end + len(piece)
        begun = chars[max(start, 0)] if start < len(chars) else len(text)
        spans.append((begun, chars[end - 1] + 1 if end > max(start, 0) else begun))
    return spans
