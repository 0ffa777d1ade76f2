"""WebSocket sessions of /v1/realtime: transcribe audio while it arrives.

Audio that is committed, by the client or at the end of a turn, is transcribed in order. If the
client disconnects, its requests are cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar
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
from modulm_route_audio.speech import Speech, TranscriptionOptions
from modulm_server.errors import ApiError, report
from modulm_server.json_body import bad_field
from modulm_speech.turns import Turn, TurnDetector

if TYPE_CHECKING:
    from modulm_server.generation import GenerationService, ServedModel
    from modulm_speech.transcriber import Wanted

__all__ = ["Sessions"]

#: Maximum commits in the queue, and minimum seconds of a commit.
_WAITING, _SHORTEST = 32, 0.1
#: Maximum bytes of an event's field other than audio, and maximum fields of an event.
_LONGEST, _FIELDS = 1 << 17, 32
#: Bytes of an event that are read at once on the event loop: about a millisecond.
_SMALL = 1 << 18
#: Close codes: server shutting down, policy violation, try again later.
_AWAY, _REFUSED, _LATER = 1001, 1008, 1013
#: The full scale of a 16-bit sample.
_FULL = 32768.0
_T = TypeVar("_T")


class Sessions:
    """The open sessions of a server process."""

    def __init__(self, generation: GenerationService, speech: Speech) -> None:
        self._generation, self._speech = generation, speech
        self._open: set[_Session] = set()

    async def serve(self, socket: WebSocket) -> None:
        """Serve a session until it is closed."""
        await socket.accept()
        session = _Session(socket, self._generation, self._speech)
        if len(self._open) >= self._speech.flags.max_realtime_sessions:
            message = "too many sessions are open; try again later"
            await session.refuse(ApiError(503, message, code="overloaded"), _LATER)
            return
        self._open.add(session)
        try:
            await session.run(socket.query_params.get("model"))
        finally:
            self._open.discard(session)

    async def stop(self) -> None:
        """Close all sessions."""
        await asyncio.gather(*(session.close(_AWAY) for session in list(self._open)))


@define(eq=False)
class _Buffer:
    """Samples that are not committed yet. dropped_samples: number of samples before them.

    Chunks stay as they came: joining megabytes on the event loop would hold up other requests.
    """

    chunks: deque[bytes | memoryview] = field(factory=deque)
    size: int = 0
    dropped_samples: int = 0

    def add(self, data: bytes) -> None:
        self.chunks.append(data)
        self.size += len(data)

    def drop(self, count: int) -> bytes:
        """Remove and return the first `count` samples."""
        wanted, dropped = min(2 * count, self.size), []
        while wanted:
            chunk = self.chunks.popleft()
            if len(chunk) > wanted:
                self.chunks.appendleft(memoryview(chunk)[wanted:])
                chunk = chunk[:wanted]
            dropped.append(chunk)
            wanted -= len(chunk)
            self.size -= len(chunk)
            self.dropped_samples += len(chunk) // 2
        return b"".join(dropped)


@define(eq=False)
class _Job:
    """Committed audio to transcribe."""

    item: Committed
    samples: bytes
    rate: int
    options: TranscriptionOptions


class _Session:
    """One session."""

    def __init__(self, socket: WebSocket, generation: GenerationService, speech: Speech) -> None:
        self._socket, self._generation, self._speech = socket, generation, speech
        self._events: OpenAiEvents = OpenAiEvents(f"sess_{uuid4().hex}")
        self._settings = Settings()
        self._model: ServedModel | None = None
        self._task_options: Wanted = speech.task_options("transcribe", None, "", False)
        self._buffer, self._turns = _Buffer(), TurnDetector(self._settings.rate)
        self._item = Committed()
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._sending = asyncio.Lock()

    async def run(self, model: str | None) -> None:
        """Process events until the client or the server closes the session."""
        worker: asyncio.Task[None] | None = None
        try:
            self._generation.check_open()
            if model is not None:
                self._settings.model.model = model
                self._model = await self._generation.find_model(model)
            await self._send(self._events.created(self._settings))
            worker = asyncio.create_task(self._work())
            while (message := await self._next(worker)) is not None:
                await self._process(message)
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
        """Send an error and close."""
        with suppress(WebSocketDisconnect, RuntimeError, OSError):
            await self._send(self._events.error(error, None))
        await self.close(code)

    async def close(self, code: int) -> None:
        """Close the session, if it is open."""
        if self._socket.application_state is WebSocketState.CONNECTED:
            with suppress(RuntimeError, OSError):
                await self._socket.close(code)

    async def _next(self, worker: asyncio.Task[None]) -> str | bytes | None:
        """Receive the next message; None if the client is idle for too long.

        Raises what has ended the worker: nothing would be transcribed any more.
        """
        while True:
            receiving = asyncio.ensure_future(self._socket.receive())
            wait = self._speech.flags.realtime_idle_timeout
            try:
                await asyncio.wait(
                    {receiving, worker}, timeout=wait, return_when=asyncio.FIRST_COMPLETED
                )
                if not receiving.done():
                    if worker.cancelled():
                        raise RuntimeError("the transcriptions of this session were cut off")
                    if worker.done():
                        worker.result()
                        raise WebSocketDisconnect(1006)
                    if self._jobs.empty():
                        return None
                    continue
                message = receiving.result()
            finally:
                receiving.cancel()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", 1005))
            return message.get("text") or message.get("bytes") or ""

    async def _process(self, message: str | bytes) -> None:
        """Process an event. Errors are sent to the client, and the session continues."""
        event_id: Any = None
        try:
            event = await _work(len(message), _decoded, message)
            event_id = event.get("event_id")
            await self._dispatch(event)
        except WebSocketDisconnect:
            raise
        except Exception as error:
            api_error = report(error, self._socket.scope)
            await self._send(
                self._events.error(api_error, event_id if isinstance(event_id, str) else None)
            )

    async def _dispatch(self, event: dict[str, Any]) -> None:
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
            raise bad_field(
                "type", f"type: {kind!r:.80} is not an event of a transcription session"
            )

    async def _update(self, event: dict[str, Any], kind: str) -> None:
        """Update the settings. The rate cannot change while audio is in the buffer."""
        settings = settings_of(event, self._settings)
        if settings.rate != self._settings.rate and self._buffer.size:
            raise bad_field("rate", "rate cannot change while audio is in the buffer")
        model = settings.model
        task_options = self._speech.task_options("transcribe", model.language, model.prompt, False)
        if model.model is not None:
            self._model = await self._generation.find_model(model.model)
        self._task_options = task_options
        if "session" not in event and type(self._events) is OpenAiEvents:
            self._events = VllmEvents(self._events.session)
        if settings.rate != self._settings.rate or settings.turns != self._settings.turns:
            self._turns = _detector(settings)
            self._buffer.dropped_samples = -(self._buffer.size // 2)
        self._settings = settings
        await self._send(self._events.updated(settings, kind))

    async def _append(self, event: dict[str, Any]) -> None:
        settings = self._settings
        most = int(2 * settings.rate * self._speech.flags.max_realtime_seconds)
        encoded = event.get("audio")
        size = len(encoded) if isinstance(encoded, str) else 0
        detector = None if settings.turns is None else self._turns
        data, turns = await _work(size, _heard, event, most - self._buffer.size, detector)
        self._buffer.add(data)
        if settings.turns is None:
            return
        for what, at in turns:
            await asyncio.sleep(0)  # other requests go on between turns; sending does not wait
            ms = at * 1000 // settings.rate
            if what == "started":
                self._buffer.drop(max(0, at - self._buffer.dropped_samples))
                await self._send(self._events.started(self._item, ms))
            else:
                await self._send(self._events.stopped(self._item, ms))
                await self._submit(self._buffer.drop(max(0, at - self._buffer.dropped_samples)))
        if not self._turns.speaking:
            padding = settings.turns.prefix_padding_ms * settings.rate // 1000
            self._buffer.drop(max(0, self._buffer.size // 2 - padding - settings.rate))

    async def _commit(self, event: dict[str, Any]) -> None:
        if type(self._events) is VllmEvents and not event.get("final"):
            return  # sent by vLLM's clients before the audio, and with `final` at its end
        least = int(_SHORTEST * self._settings.rate)
        if self._buffer.size // 2 < least:
            seconds = self._buffer.size / 2 / self._settings.rate
            message = (
                f"the buffer has {seconds:.2f} s of audio; at least {_SHORTEST:g} s are required"
            )
            raise ApiError(400, message, code="input_audio_buffer_commit_empty")
        await self._submit(self._buffer.drop(self._buffer.size // 2))

    async def _submit(self, samples: bytes) -> None:
        """Queue samples for transcription."""
        if self._jobs.qsize() >= _WAITING:
            raise ApiError(429, "too much audio is waiting to be transcribed", code="overloaded")
        adapter = None if self._model is None else self._model.adapter
        logprobs = self._settings.logprobs
        options = TranscriptionOptions(
            task_options=self._task_options,
            adapter=adapter,
            logprobs=logprobs,
            params={"max_tokens": None, "output_kind": OutputKind.DELTA},
        )
        item, self._item = self._item, Committed(self._item.id)
        await self._send(self._events.committed(item))
        self._jobs.put_nowait(_Job(item, samples, self._settings.rate, options))

    async def _work(self) -> None:
        """Transcribe the queued jobs, one after the other."""
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
        api_error = report(error, self._socket.scope)
        await self._send(self._events.failed(job.item, api_error))

    async def _transcribe(self, job: _Job) -> None:
        speech, text = self._speech, []
        rate = await self._generation.media.audio_rate()
        sound = await asyncio.to_thread(_sound, job.samples, job.rate, rate)
        parts = await asyncio.to_thread(speech.cut, sound)
        options = await speech.with_language(job.options, parts)
        async with aclosing(await speech.stream(options, parts)) as deltas:
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
    """Decode an event, with limits on all fields but the audio. Raises ApiError(400)."""
    if isinstance(message, bytes):
        raise bad_field(None, "an event must be JSON in a text message", "invalid_event")
    try:
        parts = msgspec.json.decode(message, type=dict[str, msgspec.Raw])
        long = [key for key, raw in parts.items() if key != "audio" and len(raw) > _LONGEST]
        event = {key: msgspec.json.decode(raw) for key, raw in parts.items() if key not in long}
    except msgspec.ValidationError as error:
        raise bad_field(
            "type", "an event must be an object with a type", "invalid_event"
        ) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise bad_field(None, "an event must be valid JSON", "invalid_json") from error
    if long or len(event) > _FIELDS:
        key = long[0][:64] if long else None
        raise bad_field(key, "an event has a field that is too long, or too many", "invalid_event")
    if not isinstance(event.get("type"), str):
        raise bad_field("type", "an event must be an object with a type", "invalid_event")
    return event


def _detector(settings: Settings) -> TurnDetector:
    turns = settings.turns
    if turns is None:
        return TurnDetector(settings.rate)
    silence, padding = turns.silence_duration_ms / 1000, turns.prefix_padding_ms / 1000
    return TurnDetector(settings.rate, turns.threshold, silence, padding)


async def _work(size: int, function: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function that reads `size` bytes, in a thread if it takes long."""
    if size < _SMALL:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


def _heard(
    event: Mapping[str, Any], most: int, detector: TurnDetector | None
) -> tuple[bytes, list[Turn]]:
    """The samples of an `append` event, at most `most` bytes, and the turns in them."""
    data = samples_of(event, most)
    return data, [] if detector is None else list(detector.feed(_floats(data)))


def _floats(data: bytes) -> np.ndarray:
    """[n] float32 of 16-bit samples."""
    return np.frombuffer(data, "<i2").astype(np.float32) / _FULL


def _sound(data: bytes, rate: int, wanted: int) -> Sound:
    return Sound(_floats(data), rate).at(wanted)
