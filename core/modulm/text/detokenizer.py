"""Token ids to text, a few at a time, never cutting a character in two.

The pieces joined are what decoding everything at once gives. A tokenizer of bytes is decoded
through a table and an incremental UTF-8 decoder, so that a token costs the same however long the
text is; others are decoded in a short window that ends at a safe place.
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

#: Prompt tokens that a window starts with: enough for a decoder that looks at its left neighbour.
_CONTEXT = 6
_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class _Strategy(Protocol):
    def feed(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Detokenizer:
    """Decodes the output of one sequence.

    prompt_ids: the prompt's ids (its end is enough), for decoders that depend on what is to the
    left. Special tokens are left out when `skip_special_tokens`; else, with
    `spaces_between_special_tokens=False`, no space is put between two that follow each other.
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
        """More ids -> the text that is complete."""
        return self._strategy.feed(ids)

    def finish(self) -> str:
        """The rest: U+FFFD for bytes that never became a character."""
        return self._strategy.finish()


class _Pieces:
    """Bytes of each token of a byte-level tokenizer, looked up when first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self.special = tokenizer.special_ids

    def __getitem__(self, index: int) -> bytes:
        known = self._known.get(index)
        if known is None:
            known = self._known[index] = piece_bytes(self._tokenizer.id_to_token(index) or "")
        return known


#: One table per tokenizer; a tokenizer without one is known to need windows.
_TABLES: WeakKeyDictionary[Tokenizer, _Pieces | None] = WeakKeyDictionary()


def _pieces(tokenizer: Tokenizer) -> _Pieces | None:
    if tokenizer not in _TABLES:
        _TABLES[tokenizer] = _Pieces(tokenizer) if _byte_level(tokenizer) else None
    return _TABLES[tokenizer]


def _byte_level(tokenizer: Tokenizer) -> bool:
    """Whether decoding is: join the tokens, read their letters as bytes."""
    core = tokenizer.core
    if core is None:
        return tokenizer.spelling == "byte_level"
    if core.decoder is None:
        return False
    return bool(json.loads(core.decoder.__getstate__())["type"] == "ByteLevel")


def _letters() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, others are moved up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(moved)}


_LETTERS = _letters()


def piece_bytes(token: str) -> bytes:
    """A token with a letter that is not in the alphabet was added as text and stands for it."""
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
    """`_ids` is the window; its first `_done` ids are out already, and are kept as context."""

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
        """What the window's new ids add to the text of its old ones."""
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
        """Whether the newest id and the one before it are both special."""
        special = self._tokenizer.special_ids
        return len(self._ids) > 1 and all(index in special for index in self._ids[-2:])
