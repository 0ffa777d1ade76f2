"""Messages with media: what a part of a message's content holds, and what is left of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from modulm.errors import RequestError
from modulm_media.flags import MediaKind

__all__ = ["MediaSource", "part_kind", "source_of", "take_media"]

#: Types of parts, as OpenAI's API, vLLM's and transformers' templates have them.
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
    """Where one image, sound or video of a request is; it may stand in a message as it is.

    field: of the request, for errors. url: https, data: or file:. data: a file in base64. embeds:
    a tensor in base64 in place of an image. value: the caller's own. uuid: a name under which it
    is kept, alone where it was sent before.
    """

    kind: MediaKind
    field: str
    url: str | None = None
    data: str | None = None
    embeds: Any = None
    value: Any = None
    uuid: str | None = None

    def wrong(self, words: str) -> RequestError:
        """An error that blames it."""
        field = self.field.partition("[")[0].partition(".")[0]
        return RequestError(f"{self.field}: {words}", field)


def part_kind(part: Any) -> MediaKind | None:
    """The kind of media that a part of a message's content is, None for text."""
    if isinstance(part, MediaSource):
        return part.kind
    return _KINDS.get(_type_of(part)) if isinstance(part, Mapping) else None


def _type_of(part: Mapping[str, Any]) -> str:
    """The type of a part; that of one without is its only field beside the name."""
    if "type" in part:
        return str(part["type"])
    names = [name for name in part if name in _KINDS]
    return names[0] if len(names) == 1 else ""


def take_media(
    messages: Sequence[Any],
    place: Callable[[MediaSource], Any],
    field: Callable[[int], str] = "messages[{}]".format,
) -> tuple[Sequence[Any], tuple[MediaSource, ...]]:
    """(messages, sources) of messages with media in them: `place` makes what stands there
    instead; field: the name of each message.

    Raises RequestError.
    """
    found: list[MediaSource] = []
    fresh: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(part_kind, content)):
            fresh.append(message)
            continue
        parts = []
        for at, part in enumerate(content):
            kind = part_kind(part)
            if kind is not None:
                found.append(source_of(kind, part, f"{field(index)}.content[{at}]"))
            parts.append(part if kind is None else place(found[-1]))
        fresh.append({**message, "content": parts})
    return fresh, tuple(found)


def source_of(kind: MediaKind, part: MediaSource | Mapping[str, Any], where: str) -> MediaSource:
    """What a part at `where` of a request says. Raises RequestError."""
    if isinstance(part, MediaSource):
        return part
    name = _type_of(part)
    key = {"input_image": "image_url"}.get(name, name)
    value = part.get(key, part.get(kind))
    uuid = part.get("uuid")
    made = MediaSource(kind=kind, field=f"{where}.{key}")
    if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= _LONGEST_NAME):
        raise made.wrong("uuid: a name is expected")
    made = evolve(made, uuid=uuid)
    if name == "image_embeds":
        return evolve(made, embeds=value)
    if name == "input_audio" and isinstance(value, Mapping):
        data = value.get("data")
        if not isinstance(data, str):
            raise made.wrong("data, a file in base64, and its format are expected")
        return evolve(made, data=data)
    url = value.get("url") if isinstance(value, Mapping) else value
    if isinstance(url, str):
        return evolve(made, url=url)
    if url is None and uuid is not None:
        return made
    if url is None or isinstance(value, Mapping):
        raise made.wrong("a url is expected")
    return evolve(made, value=url)
