"""What is said over a web socket of /v1/realtime: the events of OpenAI's API, and vLLM's.

Which of the two a client speaks is seen from its first `session.update`: OpenAI's has a `session`.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from uuid import uuid4

from attrs import define, field
from msgspec import Meta, Struct

from modulm_route_audio.answers import token_cards, usage_of
from modulm_route_audio.speech import Delta
from modulm_server.errors import ApiError, error_body
from modulm_server.json_body import bad_field, to_struct
from modulm_server.openapi import ErrorObject

__all__ = ["Committed", "OpenAiEvents", "Settings", "VllmEvents", "samples_of", "settings_of"]

_PREFIX = "conversation.item.input_audio_transcription"
_LOGPROBS = "item.input_audio_transcription.logprobs"
Rate = Annotated[int, Meta(ge=8000, le=48000)]
Milliseconds = Annotated[int, Meta(ge=0, le=60_000)]


class Pcm(Struct, kw_only=True):
    """`format`: samples of 16 bits, the lower byte first."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Rate = 24000


class Vad(Struct, kw_only=True):
    """`turn_detection`: turns are told by loudness."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Milliseconds = 300
    silence_duration_ms: Milliseconds = 500
    create_response: bool | None = None
    interrupt_response: bool | None = None
    idle_timeout_ms: int | None = None


class Model(Struct, kw_only=True):
    """`transcription`: what model is asked, and how."""

    model: str | None = None
    language: Annotated[str, Meta(max_length=64)] | None = None
    prompt: Annotated[str, Meta(max_length=1 << 14)] = ""


class Input(Struct, kw_only=True):
    """`audio.input` of a session."""

    format: Pcm | None = None
    transcription: Model | None = None
    turn_detection: Vad | None = None
    noise_reduction: Any = None


class Sound(Struct, kw_only=True):
    """`audio` of a session."""

    input: Input | None = None


class Session(Struct, kw_only=True):
    """`session` of `session.update`."""

    type: Literal["transcription"] = "transcription"
    audio: Sound | None = None
    include: list[Literal["item.input_audio_transcription.logprobs"]] | None = None


class OlderSession(Struct, kw_only=True):
    """`session` of `transcription_session.update`, which OpenAI's API had before."""

    input_audio_format: Literal["pcm16"] = "pcm16"
    input_audio_transcription: Model | None = None
    turn_detection: Vad | None = None
    input_audio_noise_reduction: Any = None
    include: list[Literal["item.input_audio_transcription.logprobs"]] | None = None


class Update(Struct, kw_only=True):
    """vLLM's `session.update`."""

    type: str
    event_id: str | None = None
    model: str | None = None
    rate: Rate = 16000
    language: Annotated[str, Meta(max_length=64)] | None = None
    prompt: Annotated[str, Meta(max_length=1 << 14)] = ""


@define
class Settings:
    """How a session wants its sound to be read."""

    model: Model = field(factory=Model)
    rate: int = 24000
    turns: Vad | None = None
    logprobs: bool = False


def settings_of(event: Mapping[str, Any], now: Settings) -> Settings:
    """The settings after an update; what it leaves out stays. Raises ApiError(400)."""
    if "session" not in event:
        update = to_struct(event, Update)
        model = Model(model=update.model, language=update.language, prompt=update.prompt)
        return Settings(model, update.rate)
    given = event["session"]
    if not isinstance(given, Mapping):
        raise bad_field("session", "session: an object is expected")
    if event["type"] == "transcription_session.update":
        older = to_struct(given, OlderSession)
        found = Input(
            format=Pcm(),
            transcription=older.input_audio_transcription,
            turn_detection=older.turn_detection,
            noise_reduction=older.input_audio_noise_reduction,
        )
        include, told = older.include, dict(given)
    else:
        session = to_struct(given, Session)
        found = (session.audio.input if session.audio else None) or Input()
        audio = given.get("audio")
        told = dict((audio.get("input") if isinstance(audio, Mapping) else None) or {})
        include = session.include
    if found.noise_reduction is not None:
        words = "noise_reduction: not yet supported; leave it out"
        raise bad_field("noise_reduction", words, "unsupported")
    return Settings(
        model=found.transcription or now.model,
        rate=found.format.rate if found.format is not None else now.rate,
        turns=found.turn_detection if "turn_detection" in told else now.turns,
        logprobs=now.logprobs if include is None else bool(include),
    )


def samples_of(event: Mapping[str, Any], most: int) -> bytes:
    """The samples of an `append`, at most so many bytes. Raises ApiError(400)."""
    given = event.get("audio")
    if not isinstance(given, str):
        raise bad_field("audio", "audio: samples in base64 are expected")
    if len(given) * 3 // 4 > most + 2:
        words = "audio: more than the buffer has room for; commit what is there first"
        raise bad_field("audio", words, "buffer_full")
    try:
        data = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_field("audio", f"audio: no base64: {error}") from error
    if len(data) % 2:
        raise bad_field("audio", "audio: samples of 16 bits are expected, and these bytes are odd")
    return data


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


@define
class Committed:
    """What is being transcribed: the name of the item, and the one before it."""

    before: str | None = None
    id: str = field(factory=lambda: _id("item"))
    prompt_tokens: int = 0
    tokens: int = 0

    def count(self, delta: Delta) -> None:
        """Add what a delta cost."""
        self.prompt_tokens += delta.prompt_tokens
        self.tokens += delta.tokens


class OpenAiEvents:
    """The events of OpenAI's API."""

    def __init__(self, session: str) -> None:
        self.session = session

    def created(self, settings: Settings) -> list[dict[str, Any]]:
        """The session is there; `id` and `created` are vLLM's."""
        own = {"id": self.session, "created": int(time.time())}
        return [{**_event("session.created"), **own, "session": self._card(settings)}]

    def updated(self, settings: Settings, kind: str) -> list[dict[str, Any]]:
        """Its settings have changed."""
        return [{**_event(f"{kind}d"), "session": self._card(settings)}]

    def cleared(self) -> list[dict[str, Any]]:
        """The buffer is empty."""
        return [_event("input_audio_buffer.cleared")]

    def started(self, item: Committed, ms: int) -> list[dict[str, Any]]:
        """Somebody speaks."""
        kind = "input_audio_buffer.speech_started"
        return [{**_event(kind), "item_id": item.id, "audio_start_ms": ms}]

    def stopped(self, item: Committed, ms: int) -> list[dict[str, Any]]:
        """Nobody speaks any more."""
        kind = "input_audio_buffer.speech_stopped"
        return [{**_event(kind), "item_id": item.id, "audio_end_ms": ms}]

    def committed(self, item: Committed) -> list[dict[str, Any]]:
        """Sound became an item."""
        content = {"type": "input_audio", "transcript": None}
        card = {"id": item.id, "object": "realtime.item", "type": "message", "role": "user"}
        added = {**card, "status": "completed", "content": [content]}
        before = {"previous_item_id": item.before}
        return [
            {**_event("input_audio_buffer.committed"), **before, "item_id": item.id},
            {**_event("conversation.item.added"), **before, "item": added},
        ]

    def delta(self, item: Committed, delta: Delta, tokenizer: Any) -> list[dict[str, Any]]:
        """More of its text."""
        made = {**self._of(item, "delta"), "delta": delta.text}
        if delta.logprobs:
            made["logprobs"] = token_cards(delta.logprobs, tokenizer)
        return [made]

    def done(self, item: Committed, text: str) -> list[dict[str, Any]]:
        """All of its text."""
        usage = usage_of(item.prompt_tokens, item.tokens)
        kept = {key: usage[key] for key in ("type", "input_tokens", "output_tokens",
                                            "total_tokens")}  # fmt: skip
        return [{**self._of(item, "completed"), "transcript": text, "usage": kept}]

    def failed(self, item: Committed, error: ApiError) -> list[dict[str, Any]]:
        """It has no text."""
        return [{**self._of(item, "failed"), "error": _told(error)}]

    def error(self, error: ApiError, given: str | None) -> list[dict[str, Any]]:
        """An event of the client's cannot be taken; given: its id."""
        return [{**_event("error"), "error": {**_told(error), "event_id": given}}]

    @staticmethod
    def _of(item: Committed, what: str) -> dict[str, Any]:
        return {**_event(f"{_PREFIX}.{what}"), "item_id": item.id, "content_index": 0}

    def _card(self, settings: Settings) -> dict[str, Any]:
        turns, model = settings.turns, settings.model
        shown = None if turns is None else {
            "type": turns.type,
            "threshold": turns.threshold,
            "prefix_padding_ms": turns.prefix_padding_ms,
            "silence_duration_ms": turns.silence_duration_ms,
        }  # fmt: skip
        heard = {"model": model.model, "language": model.language, "prompt": model.prompt}
        given = {
            "format": {"type": "audio/pcm", "rate": settings.rate},
            "transcription": heard,
            "noise_reduction": None,
            "turn_detection": shown,
        }
        return {
            "id": self.session,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {"input": given},
            "include": [_LOGPROBS] if settings.logprobs else [],
        }


class VllmEvents(OpenAiEvents):
    """vLLM's events: text alone, as it comes."""

    def updated(self, settings: Settings, kind: str) -> list[dict[str, Any]]:
        return []

    def committed(self, item: Committed) -> list[dict[str, Any]]:
        return []

    def delta(self, item: Committed, delta: Delta, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"type": "transcription.delta", "delta": delta.text}]

    def done(self, item: Committed, text: str) -> list[dict[str, Any]]:
        counted = usage_of(item.prompt_tokens, item.tokens)
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = {name: counted[name] for name in names}  # type: ignore[literal-required]
        return [{"type": "transcription.done", "text": text, "usage": usage}]

    def failed(self, item: Committed, error: ApiError) -> list[dict[str, Any]]:
        return self.error(error, None)

    def error(self, error: ApiError, given: str | None) -> list[dict[str, Any]]:
        told = _told(error)
        return [{"type": "error", "error": told["message"], "code": told["code"] or told["type"]}]


def _event(kind: str) -> dict[str, Any]:
    return {"type": kind, "event_id": _id("event")}


def _told(error: ApiError) -> ErrorObject:
    return error_body(error)["error"]
