"""What a tokenizer is made of: a vocabulary, and perhaps what encodes conversations."""

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
    """The operations that differ between tokenizer implementations."""

    #: The Rust tokenizer where there is one: its decoder's description is known.
    core: tokenizers.Tokenizer | None = None
    #: How `token` writes bytes, where there is no Rust tokenizer: in the letters of byte-level
    #: BPE, as `<0x0A>`, or not at all.
    spelling: Literal["byte_level", "byte_fallback", "raw"] = "raw"

    @abstractmethod
    def encode(self, text: str, special: bool) -> list[int]: ...

    @abstractmethod
    def fit(
        self, texts: Sequence[str], special: bool, limit: int | None, side: str
    ) -> tuple[list[int], list[int]]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    @abstractmethod
    def token(self, index: int) -> str | None: ...

    @abstractmethod
    def index(self, token: str) -> int | None: ...

    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def special_ids(self) -> frozenset[int]: ...

    def added(self) -> Mapping[str, int]:
        """Text -> id of the tokens that were added as a whole, special ones and others."""
        return {self.token(index) or "": index for index in self.special_ids()}


class ChatEncoder(ABC):
    """Makes conversations into token ids without a chat template."""

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
        """The prompt as ids, and as text with its special tokens.

        messages: in OpenAI's form. variables: `chat_template_kwargs`. Raises RequestError for
        messages, tools or variables that the format does not have.
        """


@frozen(eq=False, slots=False)
class Tokenizer:
    """Turns text into token ids and back.

    special: names to strings as templates see them (`eos_token` ...). stop_ids: ids that end a
    turn: the end-of-sequence token and those that generation_config.json adds.
    chat_template: one template, several by name, or None. response_template: how the checkpoint
    says that its messages are read, or None. chat: what encodes conversations in place of a chat
    template, or None.
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
        """The transformers tokenizer (imported when first asked for)."""
        return self._open()

    @property
    def core(self) -> tokenizers.Tokenizer | None:
        """The Rust tokenizer, or None for one written in Python."""
        return self._codec.core

    @cached_property
    def spelling(self) -> str:
        """How the vocabulary writes bytes: "byte_level", "byte_fallback" or "raw"."""
        if self.core is None:
            return self._codec.spelling
        state = b"" if self.core.decoder is None else self.core.decoder.__getstate__()
        known = (b"ByteLevel", "byte_level"), (b"ByteFallback", "byte_fallback")
        return next((name for sign, name in known if b'"%s"' % sign in state), "raw")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return self._codec.special_ids()

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The text of the special tokens, longest first."""
        texts = {self._codec.token(index) or "" for index in self.special_ids} - {""}
        return tuple(sorted(texts, key=lambda text: (-len(text), text)))

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """Text -> id of the tokens that were added as a whole, special ones and others."""
        return self._codec.added()

    @property
    def eos_id(self) -> int | None:
        """The end-of-sequence id, or None where the tokenizer names none."""
        eos = self.special.get("eos_token")
        return None if eos is None else self._codec.index(eos)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens that are written out in it become their ids.

        Raises RequestError for half of a surrogate pair, which is no text.
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
        """Ids of a text, or of two that a model is to compare, in at most `limit` tokens.

        The texts are cut at their right or left `side`, the longer of two first, and special
        tokens stay. With the ids comes where the second text begins, by token types; else None.
        """
        ids, types = self._codec.fit(texts, add_special_tokens, limit, side)
        return ids, types.index(1) if 1 in types else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; what is not UTF-8 becomes U+FFFD."""
        return self._codec.decode(ids, skip_special_tokens)

    @cached_property
    def token_text(self) -> Callable[[int], str]:
        """Text of one token, special or not; remembered, as logprobs ask for the same ones."""
        return cache(lambda index: self.decode([index], False))

    def id_to_token(self, index: int) -> str | None:
        """The token as the vocabulary writes it, or None for an id without one."""
        return self._codec.token(index) if index >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        return self._codec.index(token)
