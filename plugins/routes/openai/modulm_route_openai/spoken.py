"""`audio` in chat answers: the answer's text is generated first, then spoken."""

from __future__ import annotations

import base64
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from attrs import define, evolve, field, frozen

from modulm.contracts.sampling import SamplingParams
from modulm_route_openai.schema import VoiceId
from modulm_server.json_body import bad_field
from modulm_server.speech_output import SpeechOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from modulm.contracts.outputs import CompletionOutput, RequestOutput
    from modulm_route_openai.objects import ChatAudio, ChatChunkChoice
    from modulm_route_openai.schema import ChatRequest
    from modulm_server.chat_turn import ChatTurn, Message, Parsers
    from modulm_server.generation import GenerationService

__all__ = ["SpokenAnswers", "SpokenStream", "Voiced"]

_SPOKEN = ["text", "audio"]
#: OpenAI's name of raw samples in this API, and the one of /v1/audio/speech.
_RAW = {"pcm16": "pcm"}


@frozen
class Voiced:
    """How an answer is spoken. form: one of `modulm_speakers.sound_files.FORMATS`."""

    voice: str
    form: str
    seed: int | None = None


class SpokenAnswers:
    """Speaks the answers of a server's model."""

    def __init__(self, generation: GenerationService, parsers: Parsers) -> None:
        self._output, self._thinks = SpeechOutput(generation), parsers.reasoning is not None

    def read(self, body: ChatRequest) -> Voiced | None:
        """How the request's answer is spoken; None if it is not. Raises ApiError(400)."""
        if body.modalities in (None, ["text"]):
            if body.audio is not None:
                message = 'audio: needs modalities ["text", "audio"]'
                raise bad_field("audio", message)
            return None
        if sorted(body.modalities or ()) != sorted(_SPOKEN):
            message = 'modalities must be ["text"] or ["text", "audio"]'
            raise bad_field("modalities", message)
        if not self._output.speaks_answers:
            message = (
                "modalities: this model answers in text. For sound serve one that speaks, such as "
                "Qwen3-Omni with --enable-audio-output"
            )
            raise bad_field("modalities", message, "unsupported")
        self._check(body)
        options = body.audio
        named = None if options is None else options.voice
        voice = named.id if isinstance(named, VoiceId) else named
        form = None if options is None else options.format
        form = form or ("pcm16" if body.stream else "wav")
        if body.stream and form != "pcm16":
            raise bad_field("audio.format", f"audio.format: {form}: a stream must have pcm16")
        form = _RAW.get(form, form)
        self._output.writer(form, "audio.format")
        return Voiced(self._output.voice(voice, "audio.voice"), form, body.seed)

    def _check(self, body: ChatRequest) -> None:
        """Raise ApiError(400) for fields that do not go with sound."""
        if (body.n or 1) * (body.best_of or 1) > 1 or body.use_beam_search:
            raise bad_field("n", "n: an answer in sound is one choice, without beam search")
        if any(isinstance(tool, dict) and tool.get("type") == "mcp" for tool in body.tools or ()):
            raise bad_field("tools", "tools: those of type mcp need an answer in text")
        if self._thinks:
            message = "modalities: not supported yet: sound on a server with --reasoning-parser"
            raise bad_field("modalities", message, "unsupported")

    def prepared(self, turn: ChatTurn) -> ChatTurn:
        """The turn of an answer that is to be spoken."""
        wanted, params = self._output.wanted_states(turn.prompt), turn.params
        if not wanted or not isinstance(params, SamplingParams):
            return turn
        extra = {**(params.extra_args or {}), **wanted}
        params = params.with_(extra_args=extra, speculative=0)
        return evolve(turn, params=params, cache_salt=uuid4().hex)

    async def whole(
        self, turn: ChatTurn, voiced: Voiced, message: Message, output: RequestOutput
    ) -> tuple[ChatAudio, int]:
        """Speak an answer; returns it and its frames. output: the engine's last one."""
        choice = output.outputs[0]
        states = None if choice.arrays is None else choice.arrays.get("states")
        running = await self._output.reply(
            turn.prompt, message.token_ids, states, voiced.voice, voiced.seed
        )
        writer = self._output.writer(voiced.form, "audio.format")
        data, frames = bytearray(), 0
        if running is None:
            data += writer.finish()
        else:
            async with aclosing(running), aclosing(self._output.pieces(running, writer)) as pieces:
                async for piece in pieces:
                    data += piece.data
                    frames += piece.frames
        audio: ChatAudio = {
            "id": f"audio_{uuid4().hex}",
            "data": base64.b64encode(data).decode(),
            "expires_at": 0,
            "transcript": message.parsed.content or "",
        }
        return audio, frames

    def stream(self, turn: ChatTurn, voiced: Voiced) -> SpokenStream:
        """Speak the answer of a stream."""
        return SpokenStream(self._output, turn, voiced)


@define(eq=False)
class SpokenStream:
    """Turns the chunks of a stream into those of an answer in sound. frames: so far."""

    output: SpeechOutput
    turn: ChatTurn
    voiced: Voiced
    frames: int = field(default=0, init=False)
    _id: str = field(factory=lambda: f"audio_{uuid4().hex}", init=False)
    _tokens: list[int] = field(factory=list, init=False)
    _states: list[np.ndarray] = field(factory=list, init=False)
    _last: ChatChunkChoice | None = field(default=None, init=False)

    def note(self, output: RequestOutput) -> None:
        """Keep what the sound needs of an output of the text."""
        for choice in output.outputs:
            self._keep(choice)

    def _keep(self, choice: CompletionOutput) -> None:
        self._tokens += choice.token_ids
        arrays: Mapping[str, Any] = choice.arrays or {}
        if "states" in arrays:
            self._states.append(arrays["states"])

    def convert(self, choice: ChatChunkChoice) -> ChatChunkChoice:
        """Make text a transcript; the chunk that ends the answer waits for the sound."""
        delta = choice["delta"]
        if "content" in delta:
            text = delta.pop("content")
            if text or "role" in delta:
                delta["audio"] = {"id": self._id, "transcript": text}
        if choice["finish_reason"] is None:
            return choice
        self._last = {**choice, "delta": {}, "logprobs": None}
        return {**choice, "finish_reason": None}

    async def sounds(self) -> AsyncGenerator[ChatChunkChoice, None]:
        """Speak what was said, then end the answer."""
        last = self._last
        if last is not None and last["finish_reason"] != "tool_calls":
            states = np.concatenate(self._states) if self._states else None
            voice, form = self.voiced.voice, self.voiced.form
            running = await self.output.reply(
                self.turn.prompt, self._tokens, states, voice, self.voiced.seed
            )
            if running is not None:
                pieces = self.output.pieces(running, self.output.writer(form, "audio.format"))
                async with aclosing(running), aclosing(pieces):
                    async for piece in pieces:
                        self.frames += piece.frames
                        if piece.data:
                            data = base64.b64encode(piece.data).decode()
                            yield _chunk({"id": self._id, "data": data})
            yield _chunk({"id": self._id, "expires_at": 0})
        if last is not None:
            yield last


def _chunk(audio: Any) -> ChatChunkChoice:
    return {"index": 0, "delta": {"audio": audio}, "logprobs": None, "finish_reason": None}
