"""Prompts with `multi_modal_data`: media of callers become items of the prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from modulm.contracts.media import MediaItem
from modulm.contracts.pooler import PairContent
from modulm.errors import RequestError
from modulm.plugins.moved import public_name
from modulm_media import Media, MediaPrompt
from modulm_media.messages import MediaSource, part_kind, take_media

if TYPE_CHECKING:
    from modulm_media import MediaReader

__all__ = [
    "MEDIA_KEYS",
    "NO_MEDIA",
    "PromptMedia",
    "messages_media",
    "pair_contents",
    "placed_media",
    "split_prompt",
]

#: Keys of prompts with media, as vLLM has them.
MEDIA_KEYS = frozenset({"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"})


@frozen(eq=False)
class PromptMedia:
    """What a prompt brings beside its tokens, as `Request` has it."""

    items: tuple[MediaItem, ...] = ()
    positions: np.ndarray | None = None
    offset: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `Request`."""
        return {"media": self.items, "positions": self.positions, "position_offset": self.offset}


NO_MEDIA = PromptMedia()


def split_prompt(prompt: Any) -> tuple[Any, Any]:
    """(the prompt, what the decoder begins with) of vLLM's {"encoder_prompt": ...,
    "decoder_prompt": ...}; (prompt, None) of any other.

    An encoder's prompt with media stands beside the tokens of the decoder's. Raises RequestError.
    """
    if not isinstance(prompt, Mapping) or "encoder_prompt" not in prompt:
        return prompt, None
    unknown = sorted(set(prompt) - {"encoder_prompt", "decoder_prompt"})
    if unknown:
        raise RequestError(f"a prompt of an encoder has no {unknown[0]!r:.60}", "prompt")
    read, begun = prompt["encoder_prompt"], prompt.get("decoder_prompt")
    if not isinstance(read, Mapping) or not read.get("multi_modal_data"):
        return read, begun
    answered = begun if isinstance(begun, Mapping) else {}
    if isinstance(begun, str):
        answered = {"prompt": begun}
    elif begun is not None and not answered:
        answered = {"prompt_token_ids": begun}
    beside = {key: value for key, value in read.items() if key in MEDIA_KEYS}
    return {"prompt_token_ids": (), **answered, **beside}, None


def pair_contents(
    given: Any, name: str, reader: Callable[[], MediaReader | None]
) -> list[str | PairContent]:
    """One side of pairs, `name` of a request: texts, {"text": ...} or {"content": [parts]}, one or
    a list. Media are `MediaSource`s; reader: called if there are any. Raises RequestError.
    """
    if not isinstance(given, list | tuple):
        return [_pair_content(given, name, name, reader)]
    return [_pair_content(one, name, f"{name}[{at}]", reader) for at, one in enumerate(given)]


def _pair_content(
    given: Any, name: str, field: str, reader: Callable[[], MediaReader | None]
) -> str | PairContent:
    content = given.get("content", given.get("text")) if isinstance(given, Mapping) else given
    if not isinstance(content, list | tuple) or not isinstance(given, Mapping):
        return _pair_text(content, name)
    if not any(map(part_kind, content)):
        return "\n".join(_pair_text(part, name) for part in content)
    read, texts = reader(), []
    message = {"content": [part if part_kind(part) else _text_part(part, name) for part in content]}
    try:
        (made,), sources = messages_media([message], read, lambda index: field)
    except RequestError as error:
        if error.param == name:
            raise
        raise RequestError(f"{field}: {error.message}", name) from error
    alone = len(made["content"]) == 1
    for at, part in enumerate(made["content"]):
        before = made["content"][at - 1] if at else {}
        text = part.get("text")
        if text is None and read is not None:
            text = read.family.document(part["type"], alone)
        elif "text" in before:
            texts.append("\n")
        texts.append(text)
    return PairContent("".join(texts), made["content"], sources)


def _text_part(part: Any, name: str) -> Mapping[str, str]:
    return {"type": "text", "text": _pair_text(part, name)}


def _pair_text(given: Any, name: str) -> str:
    if isinstance(given, Mapping):
        given = given.get("text", given.get("content"))
    if not isinstance(given, str):
        words = f"{name}: a text, or an object with text, or with content of texts and media"
        raise RequestError(words, name)
    return given


def messages_media(
    messages: Sequence[Any],
    reader: MediaReader | None,
    field: Callable[[int], str] = "messages[{}]".format,
) -> tuple[Sequence[Any], tuple[MediaSource, ...]]:
    """(messages, sources): marks of `modulm_chat` stand where the messages' media were. field: the
    name of each message.

    Raises RequestError.
    """

    def place(source: MediaSource) -> Any:
        if reader is None:
            raise source.wrong(f"the model takes no {source.kind}")
        part = public_name("modulm_chat", "MediaPart", __name__)
        try:
            return part(source.kind, reader.mark(source.kind))
        except RequestError as error:
            raise source.wrong(error.message) from error

    found, sources = take_media(messages, place, field)
    if reader is not None:
        reader.check(Counter(str(source.kind) for source in sources))
    return found, sources


def placed_media(
    prompt: Mapping[str, Any],
    ids: Sequence[int] | np.ndarray,
    reader: MediaReader | None,
    truncate: int | None = None,
) -> tuple[np.ndarray, PromptMedia]:
    """(token ids, media) of a table with `multi_modal_data` whose text has these ids.

    The data are values as callers have them, by kind, `Media` in the order of their places, or a
    `MediaPrompt` that was read before. Raises RequestError.
    """
    data, options = prompt["multi_modal_data"], prompt.get("mm_processor_kwargs")
    if "prompt_embeds" in prompt:
        raise RequestError("prompts of embeddings have no media", "multi_modal_data")
    if truncate is not None:
        raise RequestError("prompts with media cannot be truncated", "truncate_prompt_tokens")
    if isinstance(data, MediaPrompt):
        return data.tokens, PromptMedia(data.items, data.positions, data.offset)
    if reader is None:
        raise RequestError("the model takes no images, audio or video", "multi_modal_data")
    if options is not None and not isinstance(options, Mapping):
        raise RequestError("mm_processor_kwargs: a table is expected", "mm_processor_kwargs")
    if isinstance(data, tuple) and all(isinstance(one, Media) for one in data):
        media = data
    else:
        from modulm_media.offline import given_media

        io = reader.flags.media_io_kwargs
        media = given_media(data, prompt.get("multi_modal_uuids"), io=io)
    if not all(isinstance(token, int | np.integer) for token in ids):
        raise RequestError("prompt_token_ids: integers are expected", "prompt")
    found = reader.read(ids, media, options)
    return found.tokens, PromptMedia(found.items, found.positions, found.offset)
