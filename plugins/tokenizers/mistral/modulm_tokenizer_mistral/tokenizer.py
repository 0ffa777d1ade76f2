"""mistral-common's two kinds of vocabulary, byte-level and SentencePiece, as modulm tokenizers."""

from __future__ import annotations

from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.image import ImageEncoder, ImageEncoding
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from modulm.contracts.tokenizer import Codec, Tokenizer
from modulm.errors import CheckpointError
from modulm_tokenizer_mistral.messages import MistralChatEncoder
from modulm_tokenizers.tokenizer import stop_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["open_tokenizer"]

_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def open_tokenizer(file: Path) -> Tokenizer:
    """Open a tokenizer file in Mistral's format. Raises CheckpointError if it is broken."""
    try:
        mistral = MistralTokenizer.from_file(str(file))
    except Exception as error:
        raise CheckpointError(f"{file}: not a tokenizer: {error}") from error
    instruct = mistral.instruct_tokenizer
    inner, images = instruct.tokenizer, getattr(instruct, "image_encoder", None)
    if images is not None:
        instruct.image_encoder = _OneToken(images.image_config, images.special_ids)
    tekken = isinstance(inner, Tekkenizer)
    codec: _MistralCodec = _Tekken(inner) if tekken else _SentencePiece(inner)
    special = {key: text for key, text in _SPECIAL.items() if codec.index(text) is not None}
    return Tokenizer(
        codec=codec,
        special=special,
        stop_ids=stop_ids(codec, special, file.parent),
        chat_template=None,
        name=str(file.parent),
        open=lambda: mistral,
        chat=MistralChatEncoder(mistral, codec),
    )


class _OneToken(ImageEncoder):
    """Encodes an image as one token, which the model's media family replaces."""

    def __call__(self, content: Any) -> ImageEncoding:
        return ImageEncoding([self.image_token], np.zeros(0))


class _MistralCodec(Codec):
    """Shared by both kinds. Control tokens spelled out in a text are encoded as text."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self.inner.encode(text, bos=special, eos=False)
        return ids

    def fit(
        self, texts: Sequence[str], special: bool, limit: int | None, side: str
    ) -> tuple[list[int], list[int]]:
        parts = [self.encode(text, False) for text in texts]
        first = [self.inner.bos_id] if special else []
        if limit is not None:
            excess = sum(map(len, parts)) + len(first) - limit
            while excess > 0 and any(parts):
                longest = max(parts, key=len)
                others = max((len(part) for part in parts if part is not longest), default=0)
                cut = min(excess, max(len(longest) - others, 1))
                del longest[slice(-cut, None) if side == "right" else slice(cut)]
                excess -= cut
        types = [0] * len(first) + [i for i, part in enumerate(parts) for _ in part]
        return [*first, *(index for part in parts for index in part)], types

    def size(self) -> int:
        return int(self.inner.n_words)

    def special_ids(self) -> frozenset[int]:
        return self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.inner.special_ids)


def _alphabet() -> tuple[str, ...]:
    """Return the letters that byte-level vocabularies use for bytes (GPT-2's)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    return tuple(chr(byte if byte in plain else next(moved)) for byte in range(256))


_LETTERS = _alphabet()


class _Tekken(_MistralCodec):
    """A byte-level vocabulary; special tokens come first."""

    spelling = "byte_level"

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        chunks = (self._bytes(i) for i in ids if not (skip_special_tokens and i in self._special))
        return b"".join(chunks).decode("utf-8", "replace")

    def token(self, index: int) -> str | None:
        if not 0 <= index < self.size():
            return None
        written = self._bytes(index)
        if index in self._special:
            return written.decode()
        return "".join([_LETTERS[byte] for byte in written])

    def index(self, token: str) -> int | None:
        return self._ids.get(token)

    def _bytes(self, index: int) -> bytes:
        if not 0 <= index < self.size():
            return b""
        return bytes(self.inner.id_to_byte_piece(index, SpecialTokenPolicy.KEEP))

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        return {self.token(index) or "": index for index in range(self.size())}


class _SentencePiece(_MistralCodec):
    """A vocabulary of text pieces, with pieces like `<0x0A>` for bytes."""

    spelling = "byte_fallback"

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = [index for index in ids if 0 <= index < self.size()]
        texts = []
        for special, run in groupby(known, self._special.__contains__):
            if not special:
                texts.append(self.inner.decode(list(run), SpecialTokenPolicy.IGNORE))
            elif not skip_special_tokens:
                texts += [self.inner.id_to_piece(index) for index in run]
        return "".join(texts)

    def token(self, index: int) -> str | None:
        return str(self.inner.id_to_piece(index)) if 0 <= index < self.size() else None

    def index(self, token: str) -> int | None:
        return self._ids.get(token)

    @cached_property
    def _ids(self) -> Mapping[str, int]:
        return {self.token(index) or "": index for index in range(self.size())}
