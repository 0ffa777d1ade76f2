"""Reads texts aloud: `/v1/audio/speech`."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from attrs import define, frozen
from msgspec import UNSET, Meta, Struct, UnsetType

from modulm.contracts.sampling import OutputKind, SamplingParams
from modulm.errors import PluginNotFound, UnsupportedError
from modulm.plugins import manager
from modulm_route_audio.answers import usage_of
from modulm_route_audio.objects import TokenUsage
from modulm_server.errors import ApiError, ClientGone
from modulm_server.json_body import bad_field
from modulm_server.prompts import Prompt
from modulm_server.sse import EventStream, frame
from modulm_speakers.sound_files import FORMATS, SoundWriter, open_writer
from modulm_speakers.speaker import Speaker

if TYPE_CHECKING:
    from modulm_server.generation import GenerationService, Running

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
        if self.response_format not in FORMATS:
            known = ", ".join(FORMATS)
            message = f"response_format: {self.response_format!r:.40} is not one of {known}"
            raise bad_field("response_format", message)
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


@frozen
class _Spoken:
    """A piece of a sound file. usage: with the last one."""

    data: bytes
    usage: TokenUsage | None = None


@define(eq=False)
class Synthesis:
    """Reads texts aloud with the engine's model."""

    generation: GenerationService

    @cached_property
    def _speaker_class(self) -> type[Speaker] | None:
        info = self.generation.engine.info
        if not info.limit("speech", "rate"):
            return None
        try:
            speaker: type[Speaker] = manager.current().load("speakers", info.architecture)
        except PluginNotFound:
            return None
        return speaker

    @property
    def served(self) -> bool:
        """Whether the model speaks."""
        return self._speaker_class is not None

    @cached_property
    def speaker(self) -> Speaker:
        """The model's speaker. Raises ApiError(400) if the model does not speak."""
        if self._speaker_class is None:
            message = "the model does not speak: serve one that does, such as CSM"
            raise ApiError(400, message, code="unsupported")
        path = Path(self.generation.engine.info.path)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return self._speaker_class(self.generation.tokenizer, path, config)

    async def answer(self, body: SpeechRequest) -> EventStream:
        """Start speaking. Raises ApiError(400) naming the field."""
        speaker = self.speaker
        body.check()
        voice = self._voice(body)
        if body.instructions.strip() and not speaker.takes_instructions:
            message = "instructions are not supported by this model"
            raise bad_field("instructions", message, "unsupported")
        writer = self._writer(body)
        model = await self.generation.find_model(body.model)
        self.generation.work.check(len(body.input), "input")
        utterance = await self.generation.work.run(
            len(body.input), speaker.ask, body.input, voice, body.instructions
        )
        running = await self.generation.generate(
            Prompt(array("q", utterance.tokens)),
            self._params(body, utterance.params),
            adapter=model.adapter,
            fields=_FIELDS,
        )
        spoken = _spoken(running, writer)
        if body.stream_format == "sse":
            return EventStream(_events(spoken))
        media = FORMATS[body.response_format].media_type
        return EventStream(_pieces(spoken), media=media, failed=_cut_off)

    def _voice(self, body: SpeechRequest) -> str:
        voices = self.speaker.voices
        voice = body.voice.id if isinstance(body.voice, VoiceId) else body.voice
        if voice is None:
            return voices[0]
        if voice not in voices:
            known = ", ".join(voices)
            raise bad_field("voice", f"voice: {voice!r:.40} is not one of {known}")
        return voice

    def _writer(self, body: SpeechRequest) -> SoundWriter:
        rate = self.generation.engine.info.limit("speech", "rate")
        try:
            return open_writer(body.response_format, rate)
        except UnsupportedError as error:
            message = f"response_format: {error}"
            raise bad_field("response_format", message, "unsupported") from error

    def _params(self, body: SpeechRequest, needed: Mapping[str, Any]) -> SamplingParams:
        """The parameters of the request: the client's, those of the checkpoint, the speaker's."""
        wanted, defaults = body.sampling(), dict(self.generation.engine.info.defaults)
        extra = {
            key: {name: own for name, own in value.items() if name not in wanted}
            for key, value in (needed.get("extra_args") or {}).items()
        }
        limit = body.max_new_tokens or defaults.pop("max_tokens", None)
        return SamplingParams(
            **{
                **needed,
                **defaults,
                **wanted,
                "max_tokens": limit,
                "extra_args": extra,
                "detokenize": False,
                "ignore_eos": True,
                "output_kind": OutputKind.DELTA,
            }
        )


async def _spoken(running: Running, writer: SoundWriter) -> AsyncGenerator[_Spoken, None]:
    """Yield the sound file as it is spoken."""
    prompt = answer = 0
    async with aclosing(running):
        async for output in running:
            prompt = len(output.prompt_token_ids)
            for choice in output.outputs:
                answer += len(choice.token_ids)
                if choice.arrays is not None:
                    yield _Spoken(writer.add(choice.arrays["samples"]))
    yield _Spoken(writer.finish(), usage_of(prompt, answer))


async def _pieces(spoken: AsyncGenerator[_Spoken, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(spoken):
        async for piece in spoken:
            if piece.data:
                yield piece.data


async def _events(spoken: AsyncGenerator[_Spoken, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(spoken):
        async for piece in spoken:
            if piece.data:
                audio = base64.b64encode(piece.data).decode()
                yield frame(SpeechEvent(type="speech.audio.delta", audio=audio))
            if piece.usage is not None:
                yield frame(SpeechEvent(type="speech.audio.done", usage=piece.usage))


def _cut_off(error: ApiError) -> bytes:
    """End the connection without the end of the body, so that clients notice that sound lacks."""
    raise ClientGone
