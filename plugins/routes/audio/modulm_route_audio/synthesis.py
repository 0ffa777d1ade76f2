"""Reads texts aloud: `/v1/audio/speech`."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from attrs import define, field
from msgspec import UNSET, Meta, Struct, UnsetType

from modulm_route_audio.answers import usage_of
from modulm_route_audio.objects import TokenUsage
from modulm_server.errors import ApiError, ClientGone
from modulm_server.json_body import bad_field
from modulm_server.speech_output import SoundPiece, SpeechOutput
from modulm_server.sse import EventStream, frame
from modulm_speakers.sound_files import FORMATS

if TYPE_CHECKING:
    from modulm_server.generation import GenerationService

__all__ = ["SpeechEvent", "SpeechRequest", "Synthesis"]

_TEXT = 1 << 16
#: The API's names of engine fields.
_FIELDS = {"prompt": "input", "max_tokens": "max_new_tokens"}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")


class VoiceId(Struct, kw_only=True):
    """A voice by its id."""

    id: str


class SpeechRequest(Struct, kw_only=True):
    """The fields of `/v1/audio/speech`. `max_new_tokens` and sampling fields are additions."""

    input: Annotated[str, Meta(max_length=_TEXT)]
    model: str | UnsetType = UNSET
    voice: str | VoiceId | None = None
    instructions: Annotated[str, Meta(max_length=_TEXT)] = ""
    response_format: str = "mp3"
    speed: float = 1.0
    stream_format: Literal["audio", "sse"] = "audio"
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None

    def check(self) -> None:
        """Raise ApiError(400) for unsupported fields."""
        if not self.input.strip():
            raise bad_field("input", "input is empty: send the text to read aloud")
        if self.speed != 1:
            message = "Not supported yet: speed. Leave it out, or change the speed of the sound."
            raise bad_field("speed", message, "unsupported")

    def sampling(self) -> dict[str, Any]:
        """The requested fields of SamplingParams."""
        values = {name: getattr(self, name) for name in _SAMPLING}
        return {name: value for name, value in values.items() if value is not None}


class SpeechEvent(TypedDict):
    """An event of `stream_format: sse`. audio: base64."""

    type: Literal["speech.audio.delta", "speech.audio.done"]
    audio: NotRequired[str]
    usage: NotRequired[TokenUsage]


@define(eq=False)
class Synthesis:
    """Reads texts aloud with the engine's model."""

    generation: GenerationService
    output: SpeechOutput = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.output = SpeechOutput(self.generation)

    async def answer(self, body: SpeechRequest) -> EventStream:
        """Start speaking. Raises ApiError(400) naming the field."""
        speaker = self.output.speaker
        body.check()
        named = body.voice.id if isinstance(body.voice, VoiceId) else body.voice
        voice = self.output.voice(named, "voice")
        if not speaker.reads_texts:
            message = (
                "input: this model speaks only its own answers: send a chat with modalities "
                '["text", "audio"]'
            )
            raise bad_field("input", message, "unsupported")
        if body.instructions.strip() and not speaker.takes_instructions:
            message = "instructions are not supported by this model"
            raise bad_field("instructions", message, "unsupported")
        writer = self.output.writer(body.response_format, "response_format")
        model = await self.generation.find_model(body.model)
        self.generation.work.check(len(body.input), "input")
        utterance = await self.generation.work.run(
            len(body.input), speaker.ask, body.input, voice, body.instructions
        )
        running = await self.output.start(
            utterance,
            body.sampling(),
            limit=body.max_new_tokens,
            adapter=model.adapter,
            fields=_FIELDS,
        )
        spoken = self.output.pieces(running, writer)
        if body.stream_format == "sse":
            return EventStream(_events(spoken))
        media = FORMATS[body.response_format].media_type
        return EventStream(_pieces(spoken), media=media, failed=_cut_off)


async def _pieces(spoken: AsyncGenerator[SoundPiece, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(spoken):
        async for piece in spoken:
            if piece.data:
                yield piece.data


async def _events(spoken: AsyncGenerator[SoundPiece, None]) -> AsyncGenerator[bytes, None]:
    prompt = frames = 0
    async with aclosing(spoken):
        async for piece in spoken:
            prompt, frames = piece.prompt or prompt, frames + piece.frames
            if piece.data:
                audio = base64.b64encode(piece.data).decode()
                yield frame(SpeechEvent(type="speech.audio.delta", audio=audio))
    yield frame(SpeechEvent(type="speech.audio.done", usage=usage_of(prompt, frames)))


def _cut_off(error: ApiError) -> bytes:
    """End the connection without the end of the body, so that clients notice that sound lacks."""
    raise ClientGone
