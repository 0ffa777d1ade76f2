"""Transcriber: how a model of one architecture is asked for the text of sound.

Group `modulm.transcribers`, named like the architecture. It makes prompts of sound and reads
answers; cutting sound, judging answers and writing them down is the same for all models and not
its business.
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

__all__ = ["API", "Alignment", "Question", "Segment", "Task", "Transcriber", "Wanted", "Word"]

API = 1

#: translate: what was said, in English.
Task: TypeAlias = Literal["transcribe", "translate"]


@frozen(kw_only=True)
class Wanted:
    """What is wanted of a sound.

    language: a code of `Transcriber.languages`, None where the model has no such choice. prompt:
    what was said before, or words as they are to be written. times: segments are to have them.
    """

    task: Task = "transcribe"
    language: str | None = None
    prompt: str = ""
    times: bool = False


@frozen(eq=False, kw_only=True)
class Question:
    """What the engine is asked.

    tokens: of the prompt, in which the model's media family finds the place of the sound. params:
    fields of SamplingParams that the model needs. no_speech: (place, token): how probable this
    token is at that place of prompt and answer is how probable it is that nobody speaks.
    """

    tokens: Sequence[int]
    sound: Sound
    params: Mapping[str, Any] = field(factory=dict)
    no_speech: tuple[int, int] | None = None


@frozen(kw_only=True)
class Segment:
    """What is said from start to end, in seconds of the sound that was asked about; tokens: of its
    text.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...] = ()


@frozen(kw_only=True)
class Word:
    """A word said from start to end, in seconds of the sound that was asked about."""

    start: float
    end: float
    text: str


@frozen(eq=False, kw_only=True)
class Alignment:
    """What the engine is asked to find out when an answer was said.

    tokens: of the prompt with the answer; params: fields of PoolingParams beside the task.
    """

    tokens: Sequence[int]
    params: Mapping[str, Any] = field(factory=dict)


class Transcriber(ABC):
    """How one model is asked.

    tokenizer: the engine's. path: the checkpoint's folder. config: its config.json.
    """

    api: ClassVar[int | tuple[int, int]] = API
    #: Seconds of the longest sound that it is asked about at once.
    longest: float = 30.0
    #: Whether it can find out the language.
    detects: bool = False
    #: Whether its segments have times.
    times: bool = False
    #: Whether it is told `Wanted.prompt`.
    takes_prompts: bool = True
    #: The task of pooling by which its model tells when words are said; empty: it cannot.
    aligns: str = ""

    def __init__(self, tokenizer: Tokenizer, path: Path, config: Mapping[str, Any]) -> None:
        self.tokenizer, self.path, self.config = tokenizer, path, config

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What it can do."""
        return ("transcribe",)

    @property
    def languages(self) -> Mapping[str, str]:
        """The languages that it can be told: code -> English name in small letters."""
        return MappingProxyType({})

    @abstractmethod
    def ask(self, sound: Sound, wanted: Wanted) -> Question:
        """What to ask for the text of a sound of at most `longest` seconds."""

    def ask_language(self, sound: Sound) -> Question:
        """What to ask for its language; one token is the answer. Raises UnsupportedError."""
        raise UnsupportedError("the model cannot find out the language")

    def language(self, tokens: Sequence[int]) -> str:
        """The code that the answer to `ask_language` stands for. Raises UnsupportedError."""
        raise UnsupportedError("the model cannot find out the language")

    def read(self, tokens: Sequence[int], seconds: float) -> tuple[Segment, ...]:
        """The segments of an answer to `ask`; seconds: how long its sound is."""
        text = self.tokenizer.decode(list(tokens))
        return (Segment(start=0.0, end=seconds, text=text, tokens=tuple(tokens)),)

    def align(self, question: Question, tokens: Sequence[int]) -> Alignment | None:
        """What to ask to find the words of an answer in its sound; None where there are none.

        Raises UnsupportedError without `aligns`.
        """
        raise UnsupportedError("the model does not tell when words are said")

    def words(
        self, tokens: Sequence[int], found: np.ndarray, seconds: float, language: str | None
    ) -> tuple[Word, ...]:
        """The words of an answer; found: what `align` gave. language: of the text.

        Raises UnsupportedError without `aligns`.
        """
        raise UnsupportedError("the model does not tell when words are said")
