"""The events of /v1/realtime sessions, in OpenAI's form and in vLLM's.

The first `session.update` shows which one a client uses: OpenAI's has a `session`.
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
    """`format`: 16-bit little-endian samples."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Rate = 24000


class Vad(Struct, kw_only=True):
    """`turn_detection`: detects turns by loudness."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Milliseconds = 300
    silence_duration_ms: Milliseconds = 500
    create_response: bool | None = None
    interrupt_response: bool | None = None
    idle_timeout_ms: int | None = None


class Model(Struct, kw_only=True):
    """`transcription`: the model and its options."""

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
    """`session` of `transcription_session.update`, from an older version of OpenAI's API."""

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
    """The settings of a session."""

    model: Model = field(factory=Model)
    rate: int = 24000
    turns: Vad | None = None
    logprobs: bool = False


def settings_of(event: Mapping[str, Any], now: Settings) -> Settings:
    """Apply an update to the settings; missing fields stay unchanged. Raises ApiError(400)."""
    if "session" not in event:
        update = to_struct(event, Update)
        model = Model(model=update.model, language=update.language, prompt=update.prompt)
        return Settings(model, update.rate)
    session_fields = event["session"]
    if not isinstance(session_fields, Mapping):
        raise bad_field("session", "session must be an object")
    if event["type"] == "transcription_session.update":
        older = to_struct(session_fields, OlderSession)
        audio_input = Input(
            format=Pcm(),
            transcription=older.input_audio_transcription,
            turn_detection=older.turn_detection,
            noise_reduction=older.input_audio_noise_reduction,
        )
        include, changes = older.include, dict(session_fields)
    else:
        session = to_struct(session_fields, Session)
        audio_input = (session.audio.input if session.audio else None) or Input()
        audio = session_fields.get("audio")
        changes = dict((audio.get("input") if isinstance(audio, Mapping) else None) or {})
        include = session.include
    if audio_input.noise_reduction is not None:
        message = "Not supported yet: noise_reduction. Leave it out."
        raise bad_field("noise_reduction", message, "unsupported")
    return Settings(
        model=audio_input.transcription or now.model,
        rate=audio_input.format.rate if audio_input.format is not None else now.rate,
        turns=audio_input.turn_detection if "turn_detection" in changes else now.turns,
        logprobs=now.logprobs if include is None else bool(include),
    )


def samples_of(event: Mapping[str, Any], max_bytes: int) -> bytes:
    """Decode the samples of an `append` event. Raises ApiError(400)."""
    encoded = event.get("audio")
    if not isinstance(encoded, str):
        raise bad_field("audio", "audio must be samples in base64")
    if len(encoded) * 3 // 4 > max_bytes + 2:
        message = "audio exceeds the buffer; commit the buffer first"
        raise bad_field("audio", message, "buffer_full")
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_field("audio", f"audio is not valid base64: {error}") from error
    if len(data) % 2:
        raise bad_field("audio", "audio must be 16-bit samples, but has an odd number of bytes")
    return data


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


@define
class Committed:
    """A committed item: its id, and the id of the previous one."""

    before: str | None = None
    id: str = field(factory=lambda: _id("item"))
    prompt_tokens: int = 0
    tokens: int = 0

    def count(self, delta: Delta) -> None:
        """Add the tokens of a delta."""
        self.prompt_tokens += delta.prompt_tokens
        self.tokens += delta.tokens


class OpenAiEvents:
    """The events of OpenAI's API."""

    def __init__(self, session: str) -> None:
        self.session = session

    def created(self, settings: Settings) -> list[dict[str, Any]]:
        """The session was created. `id` and `created` are for vLLM's clients."""
        vllm_fields = {"id": self.session, "created": int(time.time())}
        return [{**_event("session.created"), **vllm_fields, "session": self._card(settings)}]

    def updated(self, settings: Settings, kind: str) -> list[dict[str, Any]]:
        """The settings were updated."""
        return [{**_event(f"{kind}d"), "session": self._card(settings)}]

    def cleared(self) -> list[dict[str, Any]]:
        """The buffer was cleared."""
        return [_event("input_audio_buffer.cleared")]

    def started(self, item: Committed, ms: int) -> list[dict[str, Any]]:
        """Speech started."""
        kind = "input_audio_buffer.speech_started"
        return [{**_event(kind), "item_id": item.id, "audio_start_ms": ms}]

    def stopped(self, item: Committed, ms: int) -> list[dict[str, Any]]:
        """Speech stopped."""
        kind = "input_audio_buffer.speech_stopped"
        return [{**_event(kind), "item_id": item.id, "audio_end_ms": ms}]

    def committed(self, item: Committed) -> list[dict[str, Any]]:
        """The buffer was committed as an item."""
        content = {"type": "input_audio", "transcript": None}
        card = {"id": item.id, "object": "realtime.item", "type": "message", "role": "user"}
        added = {**card, "status": "completed", "content": [content]}
        before = {"previous_item_id": item.before}
        return [
            {**_event("input_audio_buffer.committed"), **before, "item_id": item.id},
            {**_event("conversation.item.added"), **before, "item": added},
        ]

    def delta(self, item: Committed, delta: Delta, tokenizer: Any) -> list[dict[str, Any]]:
        """More of an item's text."""
        event = {**self._item_event(item, "delta"), "delta": delta.text}
        if delta.logprobs:
            event["logprobs"] = token_cards(delta.logprobs, tokenizer)
        return [event]

    def done(self, item: Committed, text: str) -> list[dict[str, Any]]:
        """The complete text of an item."""
        usage = usage_of(item.prompt_tokens, item.tokens)
        token_usage = {key: usage[key] for key in ("type", "input_tokens", "output_tokens",
                                            "total_tokens")}  # fmt: skip
        return [{**self._item_event(item, "completed"), "transcript": text, "usage": token_usage}]

    def failed(self, item: Committed, error: ApiError) -> list[dict[str, Any]]:
        """The transcription of an item failed."""
        return [{**self._item_event(item, "failed"), "error": _error_object(error)}]

    def error(self, error: ApiError, event_id: str | None) -> list[dict[str, Any]]:
        """A client's event was rejected."""
        return [{**_event("error"), "error": {**_error_object(error), "event_id": event_id}}]

    @staticmethod
    def _item_event(item: Committed, what: str) -> dict[str, Any]:
        return {**_event(f"{_PREFIX}.{what}"), "item_id": item.id, "content_index": 0}

    def _card(self, settings: Settings) -> dict[str, Any]:
        turns, model = settings.turns, settings.model
        turn_detection = None if turns is None else {
            "type": turns.type,
            "threshold": turns.threshold,
            "prefix_padding_ms": turns.prefix_padding_ms,
            "silence_duration_ms": turns.silence_duration_ms,
        }  # fmt: skip
        heard = {"model": model.model, "language": model.language, "prompt": model.prompt}
        audio_input = {
            "format": {"type": "audio/pcm", "rate": settings.rate},
            "transcription": heard,
            "noise_reduction": None,
            "turn_detection": turn_detection,
        }
        return {
            "id": self.session,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {"input": audio_input},
            "include": [_LOGPROBS] if settings.logprobs else [],
        }


class VllmEvents(OpenAiEvents):
    """vLLM's events: only the text, as deltas."""

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

    def error(self, error: ApiError, event_id: str | None) -> list[dict[str, Any]]:
        error_object = _error_object(error)
        return [
            {
                "type": "error",
                "error": error_object["message"],
                "code": error_object["code"] or error_object["type"],
            }
        ]


def _event(kind: str) -> dict[str, Any]:
    return {"type": kind, "event_id": _id("event")}


def _error_object(error: ApiError) -> ErrorObject:
    return error_body(error)["error"]
