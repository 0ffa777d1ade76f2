"""Web sockets of /v1/realtime: sound comes in pieces, its text goes out as it is known.

What is committed, by the client or at the end of a turn, is transcribed in the order in which it
came. Who hangs up ends what was asked for.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
import numpy as np
from attrs import define, field
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from modulm.contracts.sampling import OutputKind
from modulm_media import Sound
from modulm_route_audio.realtime_events import (
    Committed,
    OpenAiEvents,
    Settings,
    VllmEvents,
    samples_of,
    settings_of,
)
from modulm_route_audio.speech import Asked, Speech
from modulm_server.errors import ApiError, report
from modulm_server.json_body import bad_field
from modulm_speech.turns import TurnDetector

if TYPE_CHECKING:
    from modulm_server.generation import GenerationService, ServedModel
    from modulm_speech.transcriber import Wanted

__all__ = ["Sessions"]

#: Commits that may wait to be transcribed, and seconds of the shortest.
_WAITING, _SHORTEST = 32, 0.1
#: Bytes of a field of an event, beside those of sound, and fields of one.
_LONGEST, _FIELDS = 1 << 17, 32
#: Why a web socket is closed: the server goes down, what was sent is not taken, later again.
_AWAY, _REFUSED, _LATER = 1001, 1008, 1013
#: What a 16-bit sample is at full scale.
_FULL = 32768.0


class Sessions:
    """The open web sockets of a server process."""

    def __init__(self, generation: GenerationService, speech: Speech) -> None:
        self._generation, self._speech = generation, speech
        self._open: set[_Session] = set()

    async def serve(self, socket: WebSocket) -> None:
        """One web socket, until it is closed."""
        await socket.accept()
        session = _Session(socket, self._generation, self._speech)
        if len(self._open) >= self._speech.flags.max_realtime_sessions:
            words = "as many sessions as there may be are open; try again later"
            await session.refuse(ApiError(503, words, code="overloaded"), _LATER)
            return
        self._open.add(session)
        try:
            await session.run(socket.query_params.get("model"))
        finally:
            self._open.discard(session)

    async def stop(self) -> None:
        """Close all of them."""
        await asyncio.gather(*(session.close(_AWAY) for session in list(self._open)))


@define(eq=False)
class _Buffer:
    """Samples that were not committed; fed: how many came before them."""

    parts: list[bytes] = field(factory=list)
    size: int = 0
    fed: int = 0

    def add(self, data: bytes) -> None:
        self.parts.append(data)
        self.size += len(data)

    def drop(self, count: int) -> bytes:
        """The first samples, which are there no more."""
        data = b"".join(self.parts)
        taken, rest = data[: 2 * count], data[2 * count :]
        self.parts, self.size = [rest] if rest else [], len(rest)
        self.fed += len(taken) // 2
        return taken


@define(eq=False)
class _Job:
    """What is to be transcribed."""

    item: Committed
    samples: bytes
    rate: int
    asked: Asked


class _Session:
    """One web socket."""

    def __init__(self, socket: WebSocket, generation: GenerationService, speech: Speech) -> None:
        self._socket, self._generation, self._speech = socket, generation, speech
        self._events: OpenAiEvents = OpenAiEvents(f"sess_{uuid4().hex}")
        self._settings = Settings()
        self._model: ServedModel | None = None
        self._wanted: Wanted = speech.wanted("transcribe", None, "", False)
        self._buffer, self._turns = _Buffer(), TurnDetector(self._settings.rate)
        self._item = Committed()
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._sending = asyncio.Lock()

    async def run(self, model: str | None) -> None:
        """Take events until the client or the server ends it."""
        worker: asyncio.Task[None] | None = None
        try:
            self._generation.check_open()
            if model is not None:
                self._settings.model.model = model
                self._model = await self._generation.find_model(model)
            await self._send(self._events.created(self._settings))
            worker = asyncio.create_task(self._work())
            while (message := await self._next()) is not None:
                await self._take(message)
            await self.close(1000)
        except WebSocketDisconnect:
            return
        except Exception as error:
            await self.refuse(report(error, self._socket.scope), _REFUSED)
        finally:
            if worker is not None:
                worker.cancel()
                await asyncio.gather(worker, return_exceptions=True)

    async def refuse(self, error: ApiError, code: int) -> None:
        """Say why, and close."""
        with suppress(WebSocketDisconnect, RuntimeError, OSError):
            await self._send(self._events.error(error, None))
        await self.close(code)

    async def close(self, code: int) -> None:
        """Close it, if it is open."""
        if self._socket.application_state is WebSocketState.CONNECTED:
            with suppress(RuntimeError, OSError):
                await self._socket.close(code)

    async def _next(self) -> str | bytes | None:
        """What the client sends next; None where it is silent for too long."""
        while True:
            try:
                wait = self._speech.flags.realtime_idle_timeout
                message = await asyncio.wait_for(self._socket.receive(), wait)
            except TimeoutError:
                if self._jobs.empty():
                    return None
                continue
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1005))
            return message.get("text") or message.get("bytes") or ""

    async def _take(self, message: str | bytes) -> None:
        """One event; what is wrong with it is told, and the session goes on."""
        given: Any = None
        try:
            event = _decoded(message)
            given = event.get("event_id")
            await self._do(event)
        except WebSocketDisconnect:
            raise
        except Exception as error:
            told = report(error, self._socket.scope)
            await self._send(self._events.error(told, given if isinstance(given, str) else None))

    async def _do(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind in ("session.update", "transcription_session.update"):
            await self._update(event, kind)
        elif kind == "input_audio_buffer.append":
            await self._append(event)
        elif kind == "input_audio_buffer.commit":
            await self._commit(event)
        elif kind == "input_audio_buffer.clear":
            self._buffer.drop(self._buffer.size // 2)
            await self._send(self._events.cleared())
        else:
            raise bad_field("type", f"type: {kind!r:.80} is no event of a transcription session")

    async def _update(self, event: dict[str, Any], kind: str) -> None:
        """Other settings. What is not committed keeps its rate: it cannot change any more."""
        found = settings_of(event, self._settings)
        if found.rate != self._settings.rate and self._buffer.size:
            raise bad_field("rate", "rate: cannot change while sound is in the buffer")
        model = found.model
        wanted = self._speech.wanted("transcribe", model.language, model.prompt, False)
        if model.model is not None:
            self._model = await self._generation.find_model(model.model)
        self._wanted = wanted
        if "session" not in event and type(self._events) is OpenAiEvents:
            self._events = VllmEvents(self._events.session)
        if found.rate != self._settings.rate or found.turns != self._settings.turns:
            self._turns = _detector(found)
            self._buffer.fed = -(self._buffer.size // 2)
        self._settings = found
        await self._send(self._events.updated(found, kind))

    async def _append(self, event: dict[str, Any]) -> None:
        settings = self._settings
        most = int(2 * settings.rate * self._speech.flags.max_realtime_seconds)
        data = samples_of(event, most - self._buffer.size)
        self._buffer.add(data)
        if settings.turns is None:
            return
        for what, at in self._turns.feed(_floats(data)):
            ms = at * 1000 // settings.rate
            if what == "started":
                self._buffer.drop(max(0, at - self._buffer.fed))
                await self._send(self._events.started(self._item, ms))
            else:
                await self._send(self._events.stopped(self._item, ms))
                await self._submit(self._buffer.drop(max(0, at - self._buffer.fed)))
        if not self._turns.speaking:
            kept = settings.turns.prefix_padding_ms * settings.rate // 1000
            self._buffer.drop(max(0, self._buffer.size // 2 - kept - settings.rate))

    async def _commit(self, event: dict[str, Any]) -> None:
        if type(self._events) is VllmEvents and not event.get("final"):
            return  # vLLM's clients say so that sound will come, and send `final` at its end
        least = int(_SHORTEST * self._settings.rate)
        if self._buffer.size // 2 < least:
            held = self._buffer.size / 2 / self._settings.rate
            words = f"the buffer holds {held:.2f} s of sound; at least {_SHORTEST:g} s are needed"
            raise ApiError(400, words, code="input_audio_buffer_commit_empty")
        await self._submit(self._buffer.drop(self._buffer.size // 2))

    async def _submit(self, samples: bytes) -> None:
        """Have samples transcribed, after those that came before."""
        if self._jobs.qsize() >= _WAITING:
            raise ApiError(429, "too much sound waits to be transcribed", code="overloaded")
        adapter = None if self._model is None else self._model.adapter
        logprobs = self._settings.logprobs
        asked = Asked(wanted=self._wanted, adapter=adapter, logprobs=logprobs,
                      params={"max_tokens": None, "output_kind": OutputKind.DELTA})  # fmt: skip
        item, self._item = self._item, Committed(self._item.id)
        await self._send(self._events.committed(item))
        self._jobs.put_nowait(_Job(item, samples, self._settings.rate, asked))

    async def _work(self) -> None:
        """Transcribe what was committed, one after the other."""
        while True:
            job = await self._jobs.get()
            try:
                await self._transcribe(job)
            except (WebSocketDisconnect, RuntimeError, OSError) as error:
                if self._socket.client_state is WebSocketState.DISCONNECTED:
                    return
                await self._fail(job, error)
            except Exception as error:
                await self._fail(job, error)

    async def _fail(self, job: _Job, error: Exception) -> None:
        told = report(error, self._socket.scope)
        await self._send(self._events.failed(job.item, told))

    async def _transcribe(self, job: _Job) -> None:
        speech, text = self._speech, []
        rate = await self._generation.media.audio_rate()
        sound = await asyncio.to_thread(_sound, job.samples, job.rate, rate)
        parts = await asyncio.to_thread(speech.cut, sound)
        asked = await speech.with_language(job.asked, parts)
        async with aclosing(await speech.stream(asked, parts)) as deltas:
            async for delta in deltas:
                job.item.count(delta)
                if delta.text:
                    text.append(delta.text)
                    tokenizer = self._generation.tokenizer
                    await self._send(self._events.delta(job.item, delta, tokenizer))
        await self._send(self._events.done(job.item, "".join(text).rstrip()))

    async def _send(self, events: list[dict[str, Any]]) -> None:
        async with self._sending:
            for event in events:
                await self._socket.send_text(msgspec.json.encode(event).decode())


def _decoded(message: str | bytes) -> dict[str, Any]:
    """An event; its fields but the sound are small. Raises ApiError(400)."""
    if isinstance(message, bytes):
        raise bad_field(None, "an event is JSON in a text message", "invalid_event")
    try:
        parts = msgspec.json.decode(message, type=dict[str, msgspec.Raw])
        long = [key for key, raw in parts.items() if key != "audio" and len(raw) > _LONGEST]
        event = {key: msgspec.json.decode(raw) for key, raw in parts.items() if key not in long}
    except msgspec.ValidationError as error:
        raise bad_field(
            "type", "type: an event is an object with a type", "invalid_event"
        ) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise bad_field(None, "an event must be valid JSON", "invalid_json") from error
    if long or len(event) > _FIELDS:
        key = long[0][:64] if long else None
        raise bad_field(key, "an event has a field that is too long, or too many", "invalid_event")
    if not isinstance(event.get("type"), str):
        raise bad_field("type", "type: an event is an object with a type", "invalid_event")
    return event


def _detector(settings: Settings) -> TurnDetector:
    turns = settings.turns
    if turns is None:
        return TurnDetector(settings.rate)
    silence, padding = turns.silence_duration_ms / 1000, turns.prefix_padding_ms / 1000
    return TurnDetector(settings.rate, turns.threshold, silence, padding)


def _floats(data: bytes) -> np.ndarray:
    """[n] float32 of 16-bit samples."""
    return np.frombuffer(data, "<i2").astype(np.float32) / _FULL


def _sound(data: bytes, rate: int, wanted: int) -> Sound:
    return Sound(_floats(data), rate).at(wanted)
