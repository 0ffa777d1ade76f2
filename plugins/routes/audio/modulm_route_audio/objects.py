"""OpenAI's transcript objects. Stream events are also valid chunks for vLLM's clients."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

__all__ = [
    "ChunkChoice",
    "DiarizedSegment",
    "DiarizedTranscript",
    "Duration",
    "SegmentCard",
    "TokenCard",
    "TokenUsage",
    "Transcript",
    "TranscriptEvent",
    "VerboseTranscript",
    "WordCard",
]


class Duration(TypedDict):
    """Usage by the length of audio."""

    type: Literal["duration"]
    seconds: int


class TokenUsage(TypedDict):
    """Usage by tokens. The last two fields are vLLM's."""

    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int
    prompt_tokens: int
    completion_tokens: int


class TokenCard(TypedDict):
    """A token of the text and its log probability."""

    token: str
    bytes: list[int]
    logprob: float


class Transcript(TypedDict):
    """`json`."""

    text: str
    usage: Duration
    logprobs: NotRequired[list[TokenCard]]


class SegmentCard(TypedDict):
    """A segment; times in seconds, seek: where the piece that it is of begins, in hundredths."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class WordCard(TypedDict):
    """A word; times in seconds."""

    word: str
    start: float
    end: float


class VerboseTranscript(TypedDict):
    """`verbose_json`. language: its English name, where the model has one."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: NotRequired[list[SegmentCard]]
    words: NotRequired[list[WordCard]]
    usage: Duration


class DiarizedSegment(TypedDict):
    """What one speaker says; times in seconds. speaker: empty if the model named none."""

    type: Literal["transcript.text.segment"]
    id: str
    start: float
    end: float
    text: str
    speaker: str


class DiarizedTranscript(TypedDict):
    """`diarized_json`."""

    task: Literal["transcribe", "translate"]
    duration: float
    text: str
    segments: list[DiarizedSegment]
    usage: Duration


class ChunkChoice(TypedDict):
    """vLLM's choice of a chunk."""

    index: int
    delta: dict[str, Any]
    finish_reason: str | None


class TranscriptEvent(TypedDict):
    """One event of a stream: OpenAI's, and a chunk of vLLM's."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    id: str
    object: Literal["transcription.chunk", "translation.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[TokenCard]]
    usage: NotRequired[TokenUsage]
