"""Tokenizers, and encoders of conversations for checkpoints without a chat template."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

from modulm.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import tokenizers

__all__ = ["API", "ChatEncoder", "Codec", "Tokenizer"]

API = 1


class Codec(ABC):
    """The operations that differ between tokenizer implementations: a vocabulary of your own.

    special: add the tokens that the format puts around a text, such as a beginning.
    """

    #: The Rust tokenizer, if there is one; its decoder determines `spelling`.
    core: tokenizers.Tokenizer | None = None
    #: How `token` writes bytes, without a Rust tokenizer: as letters of byte-level BPE, as
    #: `<0x0A>`, or raw.
    spelling: Literal["byte_level", "byte_fallback", "raw"] = "raw"

    @abstractmethod
    def encode(self, text: str, special: bool) -> list[int]:
        """Return a text's ids. Added tokens that are written in it become their ids."""

    @abstractmethod
    def fit(
        self, texts: Sequence[str], special: bool, limit: int | None, side: str
    ) -> tuple[list[int], list[int]]:
        """Return ids and token types (0, or 1 in the second text) of one text or a pair.

        limit: maximum number of ids, those of `special` included; the longer text is cut first,
        on its "left" or "right" `side`.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids; unknown ids are left out, invalid UTF-8 becomes U+FFFD."""

    @abstractmethod
    def token(self, index: int) -> str | None:
        """Return the token as the vocabulary spells it, or None for an unused id."""

    @abstractmethod
    def index(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None."""

    @abstractmethod
    def size(self) -> int:
        """Return the number of ids: the highest one plus one."""

    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Return the ids that `skip_special_tokens` leaves out."""

    def added(self) -> Mapping[str, int]:
        """Return text -> id of the added tokens, special and others."""
        return {self.token(index) or "": index for index in self.special_ids()}


class ChatEncoder(ABC):
    """Encodes conversations without a chat template."""

    @abstractmethod
    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> tuple[list[int], str]:
        """Return the prompt as token ids, and as text including special tokens.

        messages: in OpenAI's form. variables: `chat_template_kwargs`. Raises RequestError for
        messages, tools or variables that the format does not support.
        """


@frozen(eq=False, slots=False)
class Tokenizer:
    """Converts text to token ids and back.

    special: special tokens by name, as templates see them (`eos_token`, ...). stop_ids: ids that
    end a turn: the end-of-sequence token and those in generation_config.json. chat_template: one
    template, several by name, or None. response_template: the checkpoint's description of how to
    parse its messages, or None. chat: encoder of conversations in place of a chat template, or
    None.
    """

    _codec: Codec = field(alias="codec")
    special: Mapping[str, str]
    stop_ids: tuple[int, ...]
    chat_template: str | Mapping[str, str] | None
    name: str
    _open: Callable[[], Any] = field(alias="open")
    response_template: Mapping[str, Any] | None = None
    chat: ChatEncoder | None = None

    def __len__(self) -> int:
        return self._size

    @cached_property
    def _size(self) -> int:
        return self._codec.size()

    @cached_property
    def backend(self) -> Any:
        """The transformers tokenizer, imported on first use."""
        return self._open()

    @property
    def core(self) -> tokenizers.Tokenizer | None:
        """The Rust tokenizer, or None for a Python tokenizer."""
        return self._codec.core

    @cached_property
    def spelling(self) -> str:
        """How the vocabulary writes bytes: "byte_level", "byte_fallback" or "raw"."""
        if self.core is None:
            return self._codec.spelling
        state = b"" if self.core.decoder is None else self.core.decoder.__getstate__()
        decoders = (b"ByteLevel", "byte_level"), (b"ByteFallback", "byte_fallback")
        return next((name for decoder, name in decoders if b'"%s"' % decoder in state), "raw")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` omits."""
        return self._codec.special_ids()

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The text of the special tokens, longest first."""
        texts = {self._codec.token(index) or "" for index in self.special_ids} - {""}
        return tuple(sorted(texts, key=lambda text: (-len(text), text)))

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """Text -> id of the added tokens, special and others."""
        return self._codec.added()

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence id, or None if the tokenizer has none."""
        eos = self.special.get("eos_token")
        return None if eos is None else self._codec.index(eos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text; special tokens written in it become their ids.

        Raises RequestError for lone surrogates, which are not valid text.
        """
        try:
            return self._codec.encode(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(f"the text cannot be tokenized: {error}", "prompt") from error

    def fit(
        self,
        *texts: str,
        add_special_tokens: bool = True,
        limit: int | None = None,
        side: str = "right",
    ) -> tuple[list[int], int | None]:
        """Tokenize a text, or a pair of texts, truncated to `limit` tokens.

        Texts are truncated on their right or left `side`, the longer of a pair first; special
        tokens are kept. Also returns the index of the second text's first token, or None if the
        tokenizer sets no token types.
        """
        ids, types = self._codec.fit(texts, add_special_tokens, limit, side)
        return ids, types.index(1) if 1 in types else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids to text; invalid UTF-8 becomes U+FFFD."""
        return self._codec.decode(ids, skip_special_tokens)

    @cached_property
    def token_text(self) -> Callable[[int], str]:
        """Returns the text of one token, including special ones; cached for logprobs."""
        return cache(lambda index: self.decode([index], False))

    def id_to_token(self, index: int) -> str | None:
        """Return the token as the vocabulary spells it, or None for an unused id."""
        return self._codec.token(index) if index >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it."""
        return self._codec.index(token)
