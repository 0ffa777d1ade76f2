"""Prompts with `multi_modal_data`: media of callers become items of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from modulm.contracts.media import MediaItem
from modulm.errors import RequestError
from modulm.plugins.moved import public_name
from modulm_media import Media

if TYPE_CHECKING:
    from modulm_media import MediaReader
    from modulm_media.values import MediaKind

__all__ = ["MEDIA_KEYS", "NO_MEDIA", "PromptMedia", "messages_media", "placed_media"]

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


def messages_media(
    messages: Sequence[Any], reader: MediaReader | None
) -> tuple[Sequence[Any], tuple[Media, ...]]:
    """(messages, media): marks of `modulm_chat` stand where the messages' media were.

    Raises RequestError.
    """
    from modulm_media.messages import open_part, take_media

    def place(kind: MediaKind) -> Any:
        if reader is None:
            raise RequestError(f"messages: the model takes no {kind}", "messages")
        part = public_name("modulm_chat", "MediaPart", __name__)
        return part(kind, reader.mark(kind))

    return take_media(messages, place, open_part)


def placed_media(
    prompt: Mapping[str, Any],
    ids: Sequence[int] | np.ndarray,
    reader: MediaReader | None,
    truncate: int | None = None,
) -> tuple[np.ndarray, PromptMedia]:
    """(token ids, media) of a table with `multi_modal_data` whose text has these ids.

    The data are values as callers have them, by kind, or `Media` in the order of their places.
    Raises RequestError.
    """
    if reader is None:
        raise RequestError("the model takes no images, audio or video", "multi_modal_data")
    if "prompt_embeds" in prompt:
        raise RequestError("prompts of embeddings have no media", "multi_modal_data")
    if truncate is not None:
        raise RequestError("prompts with media cannot be truncated", "truncate_prompt_tokens")
    data, options = prompt["multi_modal_data"], prompt.get("mm_processor_kwargs")
    if options is not None and not isinstance(options, Mapping):
        raise RequestError("mm_processor_kwargs: a table is expected", "mm_processor_kwargs")
    if isinstance(data, tuple) and all(isinstance(one, Media) for one in data):
        media = data
    else:
        from modulm_media.offline import given_media

        media = given_media(data, prompt.get("multi_modal_uuids"))
    if not all(isinstance(token, int | np.integer) for token in ids):
        raise RequestError("prompt_token_ids: integers are expected", "prompt")
    found = reader.read(ids, media, options)
    return found.tokens, PromptMedia(found.items, found.positions, found.offset)
