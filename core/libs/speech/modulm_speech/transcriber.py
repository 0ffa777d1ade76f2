"""Transcribers: how an architecture is prompted to transcribe audio.

Group `modulm.transcribers`, named after the architecture. A transcriber builds prompts and parses
answers. Splitting audio, checking transcripts and formatting them is shared by all models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from attrs import field, frozen

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    from modulm.contracts.tokenizer import Tokenizer
    from modulm_media.values import Sound

__all__ = [
    "API",
    "Alignment",
    "Emitted",
    "Question",
    "Segment",
    "Task",
    "Transcriber",
    "Wanted",
    "Word",
]

API = 1

#: translate: into English.
Task: TypeAlias = Literal["transcribe", "translate"]


@frozen(kw_only=True)
class Wanted:
    """What a client requests for an audio file.

    language: a code of `Transcriber.languages`, None to detect it. prompt: preceding text, or the
    spelling of words. times: whether segments need timestamps.
    """

    task: Task = "transcribe"
    language: str | None = None
    prompt: str = ""
    times: bool = False


@frozen(eq=False, kw_only=True)
class Question:
    """A request for the engine.

    tokens: the prompt, in which the media family finds the audio placeholder. params: fields of
    SamplingParams that the model needs. no_speech: (position, token) in prompt and answer whose
    probability is the probability of no speech.
    """

    tokens: Sequence[int]
    sound: Sound
    params: Mapping[str, Any] = field(factory=dict)
    no_speech: tuple[int, int] | None = None


@frozen(kw_only=True)
class Segment:
    """Text spoken from start to end, in seconds of the input audio.

    tokens: of its text. speaker: a name that the model gives, empty if it gives none.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...] = ()
    speaker: str = ""


@frozen(kw_only=True)
class Word:
    """A word spoken from start to end, in seconds of the input audio."""

    start: float
    end: float
    text: str


@frozen(kw_only=True)
class Emitted:
    """What a model that does not generate said of a sound; nothing where nobody speaks."""

    segments: tuple[Segment, ...] = ()
    words: tuple[Word, ...] = ()


@frozen(eq=False, kw_only=True)
class Alignment:
    """A request for the timestamps of an answer's words.

    tokens: the prompt with the answer. params: fields of PoolingParams besides the task.
    """

    tokens: Sequence[int]
    params: Mapping[str, Any] = field(factory=dict)


class Transcriber(ABC):
    """How one model is prompted.

    tokenizer: the engine's. path: the checkpoint's folder. config: its config.json.
    """

    api: ClassVar[int | tuple[int, int]] = API
    #: Maximum seconds of audio per prompt.
    longest: float = 30.0
    #: Whether it can detect the language.
    detects: bool = False
    #: Whether its segments have timestamps.
    times: bool = False
    #: Whether its segments name speakers.
    diarizes: bool = False
    #: Whether it uses `Wanted.prompt`.
    takes_prompts: bool = True
    #: The pooling task that yields word timestamps; empty if there is none.
    aligns: str = ""
    #: The pooling task whose result is the transcript, for models that do not generate; empty: the
    #: model answers.
    emits: str = ""

    def __init__(self, tokenizer: Tokenizer, path: Path, config: Mapping[str, Any]) -> None:
        self.tokenizer, self.path, self.config = tokenizer, path, config

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Supported tasks."""
        return ("transcribe",)

    @property
    def languages(self) -> Mapping[str, str]:
        """Supported languages: code -> English name in lower case."""
        return MappingProxyType({})

    @abstractmethod
    def ask(self, sound: Sound, wanted: Wanted) -> Question:
        """Build the request for transcribing a sound of at most `longest` seconds."""

    def ask_language(self, sound: Sound) -> Question:
        """Build the request for detecting the language, whose answer is one token.

        Raises UnsupportedError.
        """
        raise UnsupportedError("the model cannot detect the language")

    def language(self, tokens: Sequence[int]) -> str:
        """Return the language code for the answer to `ask_language`. Raises UnsupportedError."""
        raise UnsupportedError("the model cannot detect the language")

    def read(self, tokens: Sequence[int], seconds: float) -> tuple[Segment, ...]:
        """Parse an answer to `ask` into segments; seconds: duration of its sound."""
        text = self.tokenizer.decode(list(tokens))
        return (Segment(start=0.0, end=seconds, text=text, tokens=tuple(tokens)),)

    def emitted(self, result: np.ndarray, seconds: float) -> Emitted:
        """Read the result of the task `emits`; seconds: duration of the sound.

        Raises UnsupportedError without `emits`.
        """
        raise UnsupportedError("the model generates its transcripts")

    def align(self, question: Question, tokens: Sequence[int]) -> Alignment | None:
        """Build the request for the timestamps of an answer's words; None if it has none.

        Raises UnsupportedError without `aligns`.
        """
        raise UnsupportedError("the model does not support word timestamps")

    def words(
        self, tokens: Sequence[int], alignment: np.ndarray, seconds: float, language: str | None
    ) -> tuple[Word, ...]:
        """Compute the words of an answer. alignment: result of `align`. language: of the text.

        Raises UnsupportedError without `aligns`.
        """
        raise UnsupportedError("the model does not support word timestamps")
