"""Sound as output, for the routes of all APIs: the engine's speaker, its voices, sound files."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import define, frozen

from modulm.contracts.sampling import OutputKind, SamplingParams
from modulm.errors import PluginNotFound, UnsupportedError
from modulm.plugins import manager
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field
from modulm_server.prompts import Prompt
from modulm_speakers.script import states_wanted
from modulm_speakers.sound_files import FORMATS, SoundWriter, open_writer
from modulm_speakers.speaker import Answer, Speaker, Utterance

if TYPE_CHECKING:
    from modulm_server.generation import GenerationService, Running

__all__ = ["SoundPiece", "SpeechOutput"]


@frozen
class SoundPiece:
    """A piece of a sound file. prompt, frames: tokens of the prompt, and new frames of sound."""

    data: bytes
    prompt: int = 0
    frames: int = 0


@define(eq=False)
class SpeechOutput:
    """Speaks with the engine's model. Methods that read a request raise ApiError(400)."""

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

    @property
    def speaks_answers(self) -> bool:
        """Whether it speaks its answers in conversations."""
        return self._speaker_class is not None and self._speaker_class.speaks_answers

    @cached_property
    def speaker(self) -> Speaker:
        """The model's speaker."""
        if self._speaker_class is None:
            message = (
                "the model does not speak: serve one that does, such as CSM, or Qwen3-Omni with "
                "--enable-audio-output"
            )
            raise ApiError(400, message, code="unsupported")
        path = Path(self.generation.engine.info.path)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return self._speaker_class(self.generation.tokenizer, path, config)

    def voice(self, name: str | None, field: str) -> str:
        """The voice of that name, or the default one. field: of the request, for errors."""
        voices = self.speaker.voices
        if name is None:
            return voices[0]
        if name not in voices:
            known = ", ".join(voices)
            raise bad_field(field, f"{field}: {name!r:.40} is not one of {known}")
        return name

    def writer(self, form: str, field: str) -> SoundWriter:
        """Open a sound file in a format of `FORMATS`."""
        if form not in FORMATS:
            known = ", ".join(FORMATS)
            raise bad_field(field, f"{field}: {form!r:.40} is not one of {known}")
        rate = self.generation.engine.info.limit("speech", "rate")
        try:
            return open_writer(form, rate)
        except UnsupportedError as error:
            raise bad_field(field, f"{field}: {error}", "unsupported") from error

    async def start(
        self,
        utterance: Utterance,
        wanted: Mapping[str, Any],
        *,
        limit: int | None = None,
        adapter: str | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> Running:
        """Start to speak. wanted: fields of SamplingParams from the client. limit: of frames."""
        return await self.generation.generate(
            Prompt(array("q", utterance.tokens)),
            self._params(utterance.params, wanted, limit),
            adapter=adapter,
            fields=fields,
            cache_salt=uuid4().hex if self.speaker.speaks_answers else None,
        )

    def _params(
        self, needed: Mapping[str, Any], wanted: Mapping[str, Any], limit: int | None
    ) -> SamplingParams:
        """The parameters of a request: the client's, those of the checkpoint, the speaker's."""
        texts = self.speaker.speaks_answers
        defaults = {} if texts else dict(self.generation.engine.info.defaults)
        extra = dict(needed.get("extra_args") or {})
        if "depth_sampling" in extra:
            depth = extra["depth_sampling"]
            extra["depth_sampling"] = {k: own for k, own in depth.items() if k not in wanted}
        most = limit or defaults.pop("max_tokens", None) or needed.get("max_tokens")
        return SamplingParams(
            **{
                **needed,
                **defaults,
                **wanted,
                "max_tokens": most,
                "extra_args": extra,
                "detokenize": False,
                "ignore_eos": True,
                "speculative": 0,
                "output_kind": OutputKind.DELTA,
            }
        )

    def wanted_states(self, prompt: Prompt) -> Mapping[str, Any]:
        """What a conversation's `SamplingParams.extra_args` needs, so that its answer can be
        spoken; empty if nothing.
        """
        runs = self.speaker.states_of(prompt.ids)
        return states_wanted(runs) if runs else {}

    async def reply(
        self, prompt: Prompt, tokens: Sequence[int], states: Any, voice: str, seed: int | None
    ) -> Running | None:
        """Start to speak an answer; None if it is empty. states: of `wanted_states`."""
        media = prompt.media
        answer = Answer(
            prompt=prompt.ids,
            tokens=tokens,
            states=states,
            positions=None if media is None else media.positions,
            offset=0 if media is None else media.offset,
        )
        utterance = self.speaker.reply(answer, voice)
        wanted = {} if seed is None else {"seed": seed}
        return None if utterance is None else await self.start(utterance, wanted)

    async def pieces(
        self, running: Running, writer: SoundWriter
    ) -> AsyncGenerator[SoundPiece, None]:
        """Yield the sound file as it is spoken; the last piece has no frames."""
        async with aclosing(running):
            async for output in running:
                prompt = len(output.prompt_token_ids)
                for choice in output.outputs:
                    count = len(choice.token_ids)
                    data = b""
                    if choice.arrays is not None:
                        data = writer.add(choice.arrays["samples"])
                    yield SoundPiece(data, prompt, count)
        yield SoundPiece(writer.finish())
