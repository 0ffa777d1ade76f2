"""Reads prompts with `multi_modal_data` into media items."""

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

#: Keys of prompts with media, the same as vLLM's.
MEDIA_KEYS = frozenset({"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"})


@frozen(eq=False)
class PromptMedia:
    """The media fields of a `Request`."""

    items: tuple[MediaItem, ...] = ()
    positions: np.ndarray | None = None
    offset: int = 0

    @property
    def fields(self) -> dict[str, Any]:
        """The values by the names of `Request`'s fields."""
        return {"media": self.items, "positions": self.positions, "position_offset": self.offset}


NO_MEDIA = PromptMedia()


def split_prompt(prompt: Any) -> tuple[Any, Any]:
    """Split vLLM's {"encoder_prompt": ..., "decoder_prompt": ...} into (prompt, decoder prompt).

    Any other prompt gives (prompt, None), as does an encoder prompt with media, whose media join
    the decoder prompt. Raises RequestError.
    """
    if not isinstance(prompt, Mapping) or "encoder_prompt" not in prompt:
        return prompt, None
    unknown = sorted(set(prompt) - {"encoder_prompt", "decoder_prompt"})
    if unknown:
        raise RequestError(f"an encoder prompt has no field {unknown[0]!r:.60}", "prompt")
    encoder_prompt, decoder_prompt = prompt["encoder_prompt"], prompt.get("decoder_prompt")
    if not isinstance(encoder_prompt, Mapping) or not encoder_prompt.get("multi_modal_data"):
        return encoder_prompt, decoder_prompt
    decoder_fields = decoder_prompt if isinstance(decoder_prompt, Mapping) else {}
    if isinstance(decoder_prompt, str):
        decoder_fields = {"prompt": decoder_prompt}
    elif decoder_prompt is not None and not decoder_fields:
        decoder_fields = {"prompt_token_ids": decoder_prompt}
    media_fields = {key: value for key, value in encoder_prompt.items() if key in MEDIA_KEYS}
    return {"prompt_token_ids": (), **decoder_fields, **media_fields}, None


def pair_contents(
    side: Any, name: str, reader: Callable[[], MediaReader | None]
) -> list[str | PairContent]:
    """Read one side of the pairs to score: a text, {"text": ...}, {"content": [parts]}, or a list.

    name: the request's field. reader: called only if there are media, which stay `MediaSource`s.
    Raises RequestError.
    """
    if not isinstance(side, list | tuple):
        return [_pair_content(side, name, name, reader)]
    return [_pair_content(item, name, f"{name}[{at}]", reader) for at, item in enumerate(side)]


def _pair_content(
    side: Any, name: str, field: str, reader: Callable[[], MediaReader | None]
) -> str | PairContent:
    content = side.get("content", side.get("text")) if isinstance(side, Mapping) else side
    if not isinstance(content, list | tuple) or not isinstance(side, Mapping):
        return _pair_text(content, name)
    if not any(map(part_kind, content)):
        return "\n".join(_pair_text(part, name) for part in content)
    media_reader, texts = reader(), []
    message = {"content": [part if part_kind(part) else _text_part(part, name) for part in content]}
    try:
        (plain,), sources = messages_media([message], media_reader, lambda index: field)
    except RequestError as error:
        if error.param == name:
            raise
        raise RequestError(f"{field}: {error.message}", name) from error
    single = len(plain["content"]) == 1
    for at, part in enumerate(plain["content"]):
        before = plain["content"][at - 1] if at else {}
        text = part.get("text")
        if text is None and media_reader is not None:
            text = media_reader.family.document(part["type"], single)
        elif "text" in before:
            texts.append("\n")
        texts.append(text)
    return PairContent("".join(texts), plain["content"], sources)


def _text_part(part: Any, name: str) -> Mapping[str, str]:
    return {"type": "text", "text": _pair_text(part, name)}


def _pair_text(part: Any, name: str) -> str:
    if isinstance(part, Mapping):
        part = part.get("text", part.get("content"))
    if not isinstance(part, str):
        message = f"{name} must be text, an object with text, or one with content parts"
        raise RequestError(message, name)
    return part


def messages_media(
    messages: Sequence[Any],
    reader: MediaReader | None,
    field: Callable[[int], str] = "messages[{}]".format,
) -> tuple[Sequence[Any], tuple[MediaSource, ...]]:
    """Replace the media of messages by placeholders; returns (messages, media sources).

    field: names a message in errors, by its index. Raises RequestError.
    """

    def placeholder(source: MediaSource) -> Any:
        if reader is None:
            raise source.wrong(f"the model does not support {source.kind} input")
        part = public_name("modulm_chat", "MediaPart", __name__)
        try:
            leads = not reader.flags.interleave_mm_strings
            return part(source.kind, reader.mark(source.kind), leads)
        except RequestError as error:
            raise source.wrong(error.message) from error

    plain, sources = take_media(messages, placeholder, field)
    if reader is not None:
        reader.check(Counter(str(source.kind) for source in sources))
    return plain, sources


def placed_media(
    prompt: Mapping[str, Any],
    ids: Sequence[int] | np.ndarray,
    reader: MediaReader | None,
    truncate: int | None = None,
) -> tuple[np.ndarray, PromptMedia]:
    """Put the media of a prompt with `multi_modal_data` into its token ids.

    The data are the caller's values by kind, `Media` in the order of their placeholders, or a
    `MediaPrompt` that was read before. Returns (token ids, media). Raises RequestError.
    """
    data, options = prompt["multi_modal_data"], prompt.get("mm_processor_kwargs")
    if "prompt_embeds" in prompt:
        raise RequestError("embedding prompts cannot have media", "multi_modal_data")
    if truncate is not None:
        raise RequestError("prompts with media cannot be truncated", "truncate_prompt_tokens")
    if isinstance(data, MediaPrompt):
        return data.tokens, PromptMedia(data.items, data.positions, data.offset)
    if reader is None:
        raise RequestError("the model supports no images, audio or video", "multi_modal_data")
    if options is not None and not isinstance(options, Mapping):
        raise RequestError("mm_processor_kwargs must be a mapping", "mm_processor_kwargs")
    if isinstance(data, tuple) and all(isinstance(one, Media) for one in data):
        media = data
    else:
        from modulm_media.offline import parse_media

        io = reader.flags.media_io_kwargs
        media = parse_media(data, prompt.get("multi_modal_uuids"), io=io)
    if not all(isinstance(token, int | np.integer) for token in ids):
        raise RequestError("prompt_token_ids must be integers", "prompt")
    media_prompt = reader.read(ids, media, options)
    return media_prompt.tokens, PromptMedia(
        media_prompt.items, media_prompt.positions, media_prompt.offset
    )
