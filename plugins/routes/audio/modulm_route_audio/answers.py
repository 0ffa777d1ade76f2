"""Transcripts in the formats of OpenAI's API."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

from attrs import define, field
from starlette.responses import PlainTextResponse, Response

from modulm_route_audio.objects import (
    DiarizedTranscript,
    Duration,
    SegmentCard,
    TokenCard,
    TokenUsage,
    Transcript,
    TranscriptEvent,
    VerboseTranscript,
)
from modulm_route_audio.schema import Form
from modulm_route_audio.speech import Deltas, Heard, Joiner, TranscriptionOptions
from modulm_server.json_body import json_response
from modulm_server.sse import DONE, frame
from modulm_speech.subtitles import srt, vtt

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer
    from modulm_speech.transcriber import Transcriber

__all__ = ["Whole", "frames", "usage_of"]


@define
class Whole:
    """The complete transcript of an audio file."""

    heard: Sequence[Heard]
    seconds: float
    options: TranscriptionOptions
    form: Form

    def response(self, transcriber: Transcriber) -> Response:
        """Build the response in the requested format."""
        segments = [each for heard in self.heard for each in heard.segments]
        form = self.form.response_format
        if form == "text":
            return PlainTextResponse(f"{self.text}\n")
        if form == "srt":
            return PlainTextResponse(srt(segments))
        if form == "vtt":
            return PlainTextResponse(vtt(segments), media_type="text/vtt")
        if form == "json":
            return json_response(self._plain(transcriber.tokenizer))
        if form == "diarized_json":
            return json_response(self._diarized())
        return json_response(self._verbose(transcriber))

    @property
    def text(self) -> str:
        """The whole text."""
        task_options = self.options.task_options
        joiner = Joiner("en" if task_options.task == "translate" else task_options.language)
        parts: list[str] = []
        for heard in self.heard:
            joiner.piece()
            parts.append(joiner.add(heard.text.rstrip()))
        return "".join(parts)

    @property
    def _usage(self) -> Duration:
        return {"type": "duration", "seconds": math.ceil(self.seconds)}

    def _plain(self, tokenizer: Tokenizer) -> Transcript:
        transcript: Transcript = {"text": self.text, "usage": self._usage}
        if self.form.include:
            pairs = [pair for heard in self.heard for pair in heard.logprobs]
            transcript["logprobs"] = token_cards(pairs, tokenizer)
        return transcript

    def _diarized(self) -> DiarizedTranscript:
        segments = [segment for heard in self.heard for segment in heard.segments]
        return {
            "task": self.options.task_options.task,
            "duration": round(self.seconds, 3),
            "text": self.text,
            "segments": [
                {
                    "type": "transcript.text.segment",
                    "id": f"seg_{number}",
                    "start": round(segment.start, 3),
                    "end": round(segment.end, 3),
                    "text": segment.text.strip(),
                    "speaker": segment.speaker,
                }
                for number, segment in enumerate(segments)
            ],
            "usage": self._usage,
        }

    def _verbose(self, transcriber: Transcriber) -> VerboseTranscript:
        task_options = self.options.task_options
        code = "en" if task_options.task == "translate" else task_options.language
        transcript: VerboseTranscript = {
            "task": task_options.task,
            "language": transcriber.languages.get(code or "", "unknown"),
            "duration": round(self.seconds, 3),
            "text": self.text,
            "usage": self._usage,
        }
        granularities = self.form.timestamp_granularities
        if "segment" in granularities or not granularities:
            transcript["segments"] = self._cards()
        if "word" in granularities:
            transcript["words"] = [
                {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)}
                for heard in self.heard
                for word in heard.words
            ]
        return transcript

    def _cards(self) -> list[SegmentCard]:
        pairs = [(heard, segment) for heard in self.heard for segment in heard.segments]
        return [
            {
                "id": number,
                "seek": round(heard.start * 100),
                "start": round(segment.start, 3),
                "end": round(segment.end, 3),
                "text": segment.text,
                "tokens": list(segment.tokens),
                "temperature": heard.temperature,
                "avg_logprob": heard.quality.avg_logprob,
                "compression_ratio": heard.quality.compression_ratio,
                "no_speech_prob": heard.quality.no_speech_prob,
            }
            for number, (heard, segment) in enumerate(pairs)
        ]


def token_cards(pairs: Sequence[tuple[int, float]], tokenizer: Tokenizer) -> list[TokenCard]:
    """The log probabilities of a text's tokens, without tokens that have no text."""
    cards: list[TokenCard] = []
    for token, logprob in pairs:
        text = tokenizer.decode([token])
        if text:
            cards.append({"token": text, "bytes": list(text.encode()), "logprob": logprob})
    return cards


def usage_of(prompt: int, answer: int) -> TokenUsage:
    """Token usage, with OpenAI's fields and vLLM's."""
    return {
        "type": "tokens",
        "input_tokens": prompt,
        "output_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens": prompt,
        "completion_tokens": answer,
    }


@define
class _Events:
    """Builds the events of one stream."""

    model: str
    task: str
    id: str = field(factory=lambda: f"trsc-{uuid4().hex}")
    created: int = field(factory=lambda: int(time.time()))

    def delta(self, text: str) -> TranscriptEvent:
        """More of the text."""
        event = self._event("transcript.text.delta", text, None)
        event["delta"] = text
        return event

    def done(self, text: str, usage: TokenUsage) -> TranscriptEvent:
        """The final event, with the whole text."""
        event = self._event("transcript.text.done", "", "stop")
        event["text"], event["usage"] = text, usage
        return event

    def _event(
        self,
        kind: Literal["transcript.text.delta", "transcript.text.done"],
        content: str,
        reason: str | None,
    ) -> TranscriptEvent:
        translated = self.task == "translate"
        return {
            "type": kind,
            "id": self.id,
            "object": "translation.chunk" if translated else "transcription.chunk",
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, "delta": {"content": content}, "finish_reason": reason}],
        }


async def frames(
    deltas: Deltas, options: TranscriptionOptions, form: Form, model: str, tokenizer: Tokenizer
) -> AsyncGenerator[bytes, None]:
    """The frames of a stream."""
    events = _Events(model, options.task_options.task)
    text, prompt, answer = [], 0, 0
    async with aclosing(deltas):
        async for delta in deltas:
            prompt, answer = prompt + delta.prompt_tokens, answer + delta.tokens
            if not delta.text and not delta.logprobs:
                continue
            text.append(delta.text)
            event = events.delta(delta.text)
            if form.include:
                event["logprobs"] = token_cards(delta.logprobs, tokenizer)
            if form.stream_continuous_usage_stats:
                event["usage"] = usage_of(prompt, answer)
            yield frame(event)
    yield frame(events.done("".join(text).rstrip(), usage_of(prompt, answer)))
    yield DONE
