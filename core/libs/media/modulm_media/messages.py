"""Media in chat messages: finding the parts that hold media and replacing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from modulm.errors import RequestError
from modulm_media.flags import MediaKind

__all__ = ["MediaSource", "part_kind", "source_of", "take_media"]

#: Types of content parts in OpenAI's API, vLLM and transformers' templates.
_KINDS: Mapping[str, MediaKind] = {
    "image": "image",
    "image_embeds": "image",
    "image_pil": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}
_LONGEST_NAME = 512


@frozen(eq=False, kw_only=True)
class MediaSource:
    """The source of one image, sound or video of a request; may itself be a content part.

    field: the request's field, for errors. url: https:, data: or file:. data: a file in base64.
    embeds: a tensor in base64 in place of an image. value: a value of an offline caller. uuid:
    cache key; without data it refers to media sent before.
    """

    kind: MediaKind
    field: str
    url: str | None = None
    data: str | None = None
    embeds: Any = None
    value: Any = None
    uuid: str | None = None

    def wrong(self, problem: str) -> RequestError:
        """Create an error that names this source's field."""
        field = self.field.partition("[")[0].partition(".")[0]
        return RequestError(f"{self.field}: {problem}", field)


def part_kind(part: Any) -> MediaKind | None:
    """The kind of media in a content part, None for text."""
    if isinstance(part, MediaSource):
        return part.kind
    if type(part) is not dict and not isinstance(part, Mapping):  # `type` is ten times as fast
        return None
    return _KINDS.get(_type_of(part))


def _type_of(part: Mapping[str, Any]) -> str:
    """The type of a part; without `type`, its only other field names it."""
    if "type" in part:
        return str(part["type"])
    names = [name for name in part if name in _KINDS]
    return names[0] if len(names) == 1 else ""


def take_media(
    messages: Sequence[Any],
    replace: Callable[[MediaSource], Any],
    field: Callable[[int], str] = "messages[{}]".format,
) -> tuple[Sequence[Any], tuple[MediaSource, ...]]:
    """Replace media in messages; returns (messages, sources).

    replace: makes the replacement of a source. field: formats a message's field name. Raises
    RequestError.
    """
    sources: list[MediaSource] = []
    replaced: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(part_kind, content)):
            replaced.append(message)
            continue
        parts = []
        for at, part in enumerate(content):
            kind = part_kind(part)
            if kind is not None:
                sources.append(source_of(kind, part, f"{field(index)}.content[{at}]"))
            parts.append(part if kind is None else replace(sources[-1]))
        replaced.append({**message, "content": parts})
    return replaced, tuple(sources)


def source_of(kind: MediaKind, part: MediaSource | Mapping[str, Any], where: str) -> MediaSource:
    """Parse a content part; `where` is its field, for errors. Raises RequestError."""
    if isinstance(part, MediaSource):
        return part
    name = _type_of(part)
    key = {"input_image": "image_url"}.get(name, name)
    value = part.get(key, part.get(kind))
    uuid = part.get("uuid")
    source = MediaSource(kind=kind, field=f"{where}.{key}")
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= _LONGEST_NAME):
        raise source.wrong("uuid: must be a name")
    source = evolve(source, uuid=uuid)
    if name == "image_embeds":
        return evolve(source, embeds=value)
    if name == "input_audio" and isinstance(value, Mapping):
        data = value.get("data")
        if not isinstance(data, str):
            raise source.wrong("must have data (a file in base64) and format")
        return evolve(source, data=data)
    url = value.get("url") if isinstance(value, Mapping) else value
    if isinstance(url, str):
        return evolve(source, url=url)
    if url is None and uuid is not None:
        return source
    if url is None or isinstance(value, Mapping):
        raise source.wrong("must have a url")
    return evolve(source, value=url)
