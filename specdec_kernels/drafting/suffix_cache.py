"""The outputs of earlier calls, from which suffix decoding drafts, and their file."""

from __future__ import annotations

import hashlib
import os
import struct
import sys
import tempfile
from array import array
from pathlib import Path

from specdec_kernels import native

MAGIC = b"SDKSUFFX"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ")  # magic, version, vocabulary, texts, tokens
DIGEST_SIZE = hashlib.sha256().digest_size


def expect_kernels() -> None:
    if native.cpu is None:
        raise ImportError(
            f"method 'suffix' needs the compiled CPU kernels, which are {native.cpu_error}"
        )


class SuffixCache:
    """What a patched model generated, for drafts of its later calls; several may use it at once.

    len(cache) is the number of outputs, num_tokens that of their tokens, nbytes the memory held.
    The oldest outputs leave when there are more than max_requests, or max_tokens tokens.
    """

    def __init__(self, *, max_depth: int, max_requests: int, max_tokens: int, vocab_size: int):
        self.vocab_size = vocab_size
        self.native = native.cpu.SuffixCache(
            max_depth=max_depth, max_requests=max_requests, max_tokens=max_tokens
        )

    def __len__(self) -> int:
        return self.native.num_requests

    @property
    def num_tokens(self) -> int:
        return self.native.num_tokens

    @property
    def nbytes(self) -> int:
        return self.native.bytes

    def clear(self) -> None:
        """Forgets all outputs. Those under way are not taken up again."""
        self.native.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all outputs to a file, which is replaced as a whole or not at all."""
        tokens, lengths = self.native.texts()
        body = HEADER.pack(MAGIC, VERSION, self.vocab_size, len(lengths) // 8, len(tokens) // 4)
        body += little_endian("q", lengths) + little_endian("i", tokens)
        path = Path(path)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(body + hashlib.sha256(body).digest())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def load(self, path: str | os.PathLike[str]) -> None:
        """Puts the outputs of a file in place of those here, as far as the limits allow.

        Raises:
            ValueError: the file is not whole, not ours, of another version or vocabulary; the
                cache is then as it was.
        """
        tokens, lengths = _read(Path(path), self.vocab_size)
        self.native.load(tokens, lengths)


def _read(path: Path, vocab_size: int) -> tuple[bytes, bytes]:
    """The tokens as int32 and the lengths as int64, in this machine's byte order."""
    data = path.read_bytes()

    def expect(condition: bool, expected: str, got: object) -> None:
        if not condition:
            raise ValueError(f"suffix cache: expected {expected}, got {got} in {path}")

    expect(data[: len(MAGIC)] == MAGIC, f"a file that begins with {MAGIC!r}", data[: len(MAGIC)])
    least = HEADER.size + DIGEST_SIZE
    expect(len(data) >= least, f"at least {least} bytes", len(data))
    _, version, vocab, num_texts, num_tokens = HEADER.unpack_from(data)
    expect(version == VERSION, f"version {VERSION}", version)
    size = least + 8 * num_texts + 4 * num_tokens
    expect(len(data) == size, f"{size} bytes", len(data))
    whole = hashlib.sha256(data[:-DIGEST_SIZE]).digest() == data[-DIGEST_SIZE:]
    expect(whole, "contents that agree with the checksum", "others")
    expect(vocab == vocab_size, f"a vocabulary of {vocab_size}", vocab)
    split = HEADER.size + 8 * num_texts
    lengths = little_endian("q", data[HEADER.size : split])
    tokens = little_endian("i", data[split:-DIGEST_SIZE])
    sizes, ids = array("q", lengths), array("i", tokens)
    known = min(sizes, default=0) >= 0 and sum(sizes) == num_tokens
    expect(known, f"lengths that add up to {num_tokens}", sum(sizes))
    inside = min(ids, default=0) >= 0 and max(ids, default=0) < vocab_size
    expect(inside, f"tokens from 0 to {vocab_size - 1}", "others")
    return tokens, lengths


def little_endian(kind: str, values: bytes) -> bytes:
    """From or to this machine's order of bytes."""
    if sys.byteorder == "little":
        return values
    numbers = array(kind, values)
    numbers.byteswap()
    return numbers.tobytes()
