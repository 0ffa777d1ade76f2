"""The route family."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, WebSocket
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import Response

from modulm_route_audio.answers import Whole, frames
from modulm_route_audio.objects import (
    DiarizedTranscript,
    Transcript,
    TranscriptEvent,
    VerboseTranscript,
)
from modulm_route_audio.realtime import Sessions
from modulm_route_audio.schema import FORM, Form, read_form
from modulm_route_audio.speech import Speech, TranscriptionOptions
from modulm_route_audio.synthesis import SpeechEvent, SpeechRequest, Synthesis
from modulm_server.errors import ApiError
from modulm_server.flags import ServerConfig
from modulm_server.json_body import bad_field, read, request_docs
from modulm_server.openapi import ErrorAnswer, response_docs
from modulm_server.route import RouteContext, RouteFamily
from modulm_server.sse import EventStream
from modulm_speakers.sound_files import FORMATS
from modulm_speech.transcriber import Task

__all__ = ["Audio"]

_FIELDS = 64


class Audio(RouteFamily):
    """`/v1/audio/transcriptions`, `/v1/audio/translations`, `/v1/realtime`, `/v1/audio/speech`."""

    name = "audio"
    api = 2

    def __init__(self, context: RouteContext) -> None:
        super().__init__(context)
        self.speech = Speech(context.generation)
        self.synthesis = Synthesis(context.generation)
        self._sessions = Sessions(context.generation, self.speech)
        self._warming: asyncio.Future[None] | None = None

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1", tags=["Audio"])
        transcript_docs = response_docs(
            Transcript | VerboseTranscript | DiarizedTranscript,
            events=TranscriptEvent | ErrorAnswer,
        )
        content = transcript_docs[200].setdefault("content", {})
        content.update({"text/plain": {"schema": str}, "text/vtt": {"schema": str}})
        for path, endpoint in (
            ("/audio/transcriptions", self.transcribe),
            ("/audio/translations", self.translate),
        ):
            router.add_api_route(
                path, endpoint, methods=["POST"], responses=transcript_docs, openapi_extra=FORM
            )
        sound = response_docs(None, events=SpeechEvent | ErrorAnswer)
        kinds = sound[200].setdefault("content", {})
        kinds.update({form.media_type: {"schema": str} for form in FORMATS.values()})
        router.add_api_route(
            "/audio/speech",
            self.synthesize,
            methods=["POST"],
            responses=sound,
            openapi_extra=request_docs(SpeechRequest),
        )
        if self.speech.served or self.context.directory is not None:
            router.add_api_websocket_route("/realtime", self.realtime)
        return router

    async def start(self) -> None:
        self._warming = asyncio.ensure_future(self.speech.warm())

    async def stop(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
        await self._sessions.stop()

    async def synthesize(self, request: Request) -> Response:
        """Read a text aloud. The sound is sent as it is spoken."""
        return await self.synthesis.answer(await read(request, SpeechRequest))

    async def transcribe(self, request: Request) -> Response:
        """Transcribe an audio file."""
        return await self._answer(request, "transcribe")

    async def translate(self, request: Request) -> Response:
        """Translate an audio file into English text."""
        return await self._answer(request, "translate")

    async def realtime(self, socket: WebSocket) -> None:
        """Transcribe audio from a WebSocket."""
        await self._sessions.serve(socket)

    async def _answer(self, request: Request, task: Task) -> Response:
        kind = request.headers.get("content-type", "")
        if not kind.startswith("multipart/form-data"):
            raise ApiError(415, "send the audio file as multipart/form-data")
        _ = self.speech.transcriber
        try:
            async with request.form(max_files=1, max_fields=_FIELDS) as sent:
                file, form = read_form(sent)
                form.check(task)
                data = await self._data(file)
        except HTTPException as error:
            raise bad_field("file", f"file: {error.detail}") from error
        model = await self.context.generation.find_model(form.model)
        timestamp_words = "word" in form.timestamp_granularities
        if timestamp_words:
            self.speech.check_words()
        if form.response_format == "diarized_json":
            self.speech.check_speakers()
        self.speech.check_choices(form.choices())
        options = TranscriptionOptions(
            task_options=self.speech.task_options(task, form.language, form.prompt, form.timed),
            params={**self._defaults(), **form.sampling()},
            temperature=form.temperature,
            adapter=model.adapter,
            logprobs=bool(form.include),
            word_times=timestamp_words,
        )
        sound = await self.speech.decode(data)
        parts = await asyncio.to_thread(self.speech.cut, sound)
        options = await self.speech.with_language(options, parts)
        if form.stream:
            return await self._stream(options, parts, form, model.name)
        heard = await self.speech.hear(options, parts)
        return Whole(heard, sound.seconds, options, form).response(self.speech.transcriber)

    async def _stream(
        self, options: TranscriptionOptions, parts: Any, form: Form, model: str
    ) -> Response:
        deltas = await self.speech.stream(options, parts)
        tokenizer = self.context.generation.tokenizer
        quiet = self.context.config.group(ServerConfig).sse_keep_alive_interval
        return EventStream(frames(deltas, options, form, model, tokenizer), quiet=quiet)

    def _defaults(self) -> dict[str, Any]:
        """The checkpoint's sampling defaults, without the temperature."""
        defaults = dict(self.context.engine.info.defaults)
        defaults.pop("temperature", None)
        defaults.pop("max_tokens", None)
        return defaults

    async def _data(self, file: UploadFile) -> bytes:
        """Read an uploaded file. Raises ApiError(400)."""
        most = self.speech.flags.max_audio_clip_filesize_mb << 20
        if (file.size or 0) > most:
            message = f"file: more than {most >> 20} MB (--max-audio-clip-filesize-mb)"
            raise bad_field("file", message, "file_too_large")
        data = await file.read()
        if not data:
            raise bad_field("file", "file is empty", "invalid_audio")
        return data
