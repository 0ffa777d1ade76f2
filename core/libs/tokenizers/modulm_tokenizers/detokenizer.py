"""Incremental detokenization that never splits a character.

The concatenated pieces equal the text of decoding all ids at once. A byte-level tokenizer is
decoded through a table and an incremental UTF-8 decoder, so the cost per token does not depend on
the length of the text. Others are decoded in a short window that ends at a safe position.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["Detokenizer", "piece_bytes"]

#: Prompt tokens at the start of a window: enough for decoders that depend on the previous token.
_CONTEXT = 6
_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class _Strategy(Protocol):
    def feed(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Detokenizer:
    """Decodes the output of one sequence.

    prompt_ids: the prompt's ids, of which the end suffices, for decoders that depend on the
    preceding tokens. skip_special_tokens: omit special tokens. spaces_between_special_tokens: if
    False, adjacent special tokens are joined without a space.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        table = _pieces(tokenizer)
        self._strategy: _Strategy
        if table is None:
            self._strategy = _Window(
                tokenizer, prompt_ids, skip_special_tokens, spaces_between_special_tokens
            )
        else:
            self._strategy = _Bytes(table, prompt_ids, skip_special_tokens)

    def feed(self, ids: Sequence[int]) -> str:
        """Add ids and return the text that is complete."""
        return self._strategy.feed(ids)

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD for incomplete characters."""
        return self._strategy.finish()


class _Pieces:
    """Bytes of each token of a byte-level tokenizer, cached on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self.special = tokenizer.special_ids

    def __getitem__(self, index: int) -> bytes:
        known = self._known.get(index)
        if known is None:
            known = self._known[index] = piece_bytes(self._tokenizer.id_to_token(index) or "")
        return known


#: One table per tokenizer; None for tokenizers that need windows.
_TABLES: WeakKeyDictionary[Tokenizer, _Pieces | None] = WeakKeyDictionary()


def _pieces(tokenizer: Tokenizer) -> _Pieces | None:
    if tokenizer not in _TABLES:
        _TABLES[tokenizer] = _Pieces(tokenizer) if _byte_level(tokenizer) else None
    return _TABLES[tokenizer]


def _byte_level(tokenizer: Tokenizer) -> bool:
    """Whether decoding means joining tokens and mapping their letters to bytes."""
    core = tokenizer.core
    if core is None:
        return tokenizer.spelling == "byte_level"
    if core.decoder is None:
        return False
    return bool(json.loads(core.decoder.__getstate__())["type"] == "ByteLevel")


def _letters() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable bytes as they are, others shifted."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(moved)}


_LETTERS = _letters()


def piece_bytes(token: str) -> bytes:
    """Return the bytes of a token. A token with a letter outside the alphabet was added as text."""
    try:
        return bytes([_LETTERS[letter] for letter in token])
    except KeyError:
        return token.encode("utf-8", "replace")


class _Bytes:
    def __init__(self, pieces: _Pieces, prompt_ids: Sequence[int], skip: bool) -> None:
        self._pieces = pieces
        self._skip = pieces.special if skip else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.feed(prompt_ids[-4:])

    def feed(self, ids: Sequence[int]) -> str:
        pieces, skip = self._pieces, self._skip
        return self._decoder.decode(b"".join([pieces[i] for i in ids if i not in skip]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    """A window of ids, `_ids`; its first `_done` ids are decoded already and serve as context."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip: bool, spaces: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._spaces = spaces or skip
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._done = len(self._ids)

    def feed(self, ids: Sequence[int]) -> str:
        return "".join([self._one(index) for index in ids])

    def _one(self, index: int) -> str:
        if self._skip and index in self._tokenizer.special_ids:
            return ""
        self._ids.append(index)
        token = self._tokenizer.id_to_token(index) or ""
        if _FALLBACK.fullmatch(token):
            return ""
        text = self._fresh()
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._ids) - self._done < _CONTEXT:
            return ""
        return self._emit(text)

    def finish(self) -> str:
        return self._emit(self._fresh()) if len(self._ids) > self._done else ""

    def _fresh(self) -> str:
        """Return the text that the window's new ids add."""
        decode = self._tokenizer.decode
        before = decode(self._ids[: self._done], self._skip)
        return decode(self._ids, self._skip)[len(before) :]

    def _emit(self, text: str) -> str:
        if not self._spaces and self._special_pair():
            text = text.removeprefix(" ")
        self._ids = self._ids[max(0, min(self._done, len(self._ids) - _CONTEXT)) :]
        self._done = len(self._ids)
        return text

    def _special_pair(self) -> bool:
        """Whether the last two ids are both special."""
        special = self._tokenizer.special_ids
        return len(self._ids) > 1 and all(index in special for index in self._ids[-2:])
