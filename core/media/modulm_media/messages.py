"""Messages with media: what a part of a message's content holds, and what is left of it."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from PIL import Image

from modulm.errors import RequestError
from modulm_media.values import Media, MediaKind

__all__ = ["data_image", "open_part", "part_kind", "take_media"]

#: Types of parts, as OpenAI's API, vLLM's and transformers' templates have them.
_KINDS: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "image_pil": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}


def part_kind(part: Any) -> MediaKind | None:
    """The kind of media that a part of a message's content is, None for text."""
    return _KINDS.get(str(part.get("type"))) if isinstance(part, Mapping) else None


def take_media(
    messages: Sequence[Any],
    place: Callable[[MediaKind], Any],
    read: Callable[[MediaKind, Mapping[str, Any]], Media],
) -> tuple[Sequence[Any], tuple[Media, ...]]:
    """(messages, media) of messages with media in them: `place` makes what stands in the messages
    for one of a kind, `read` opens a part. Raises RequestError.
    """
    found: list[Media] = []
    fresh: list[Any] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(part_kind, content)):
            fresh.append(message)
            continue
        parts = []
        for part in content:
            kind = part_kind(part)
            if kind is not None:
                found.append(read(kind, part))
            parts.append(part if kind is None else place(kind))
        fresh.append({**message, "content": parts})
    return fresh, tuple(found)


def open_part(kind: MediaKind, part: Mapping[str, Any]) -> Media:
    """A part that a caller of `LLM` gives: a value, a path, or an image in a data: URL.

    Raises RequestError.
    """
    from modulm_media.offline import as_media

    uuid = part.get("uuid")
    value = part.get(str(part["type"]), part.get(kind))
    url = value.get("url") if isinstance(value, Mapping) and "url" in value else value
    if isinstance(url, str) and url.startswith("data:"):
        value = data_image(url) if kind == "image" else _not_yet(kind, "a data: URL")
    elif isinstance(url, str) and url.startswith("file://"):
        value = url.removeprefix("file://")
    elif isinstance(url, str) and "://" in url:
        value = _not_yet(kind, "a URL")
    elif isinstance(value, Mapping):
        value = _not_yet(kind, f"{str(part['type'])!r} with these fields")
    else:
        value = url
    return as_media(kind, value, None if uuid is None else str(uuid))


def data_image(url: str) -> Image.Image:
    """The image in a data: URL. Raises RequestError."""
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RequestError("image_url: data: URLs are base64", "messages")
    try:
        opened = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        opened.load()
    except (binascii.Error, OSError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(f"image_url: no image: {error}"[:200], "messages") from error
    return opened


def _not_yet(kind: str, what: str) -> Any:
    raise RequestError(f"messages: {kind} of {what}: not yet; give its value", "messages")
