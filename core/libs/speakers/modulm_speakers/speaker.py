"""Speakers: how an architecture is prompted to read a text aloud.

Group `modulm.speakers`, named after the architecture. A speaker builds prompts; the model gives the
sound (`modulm_speakers.model`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import field, frozen

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["API", "Answer", "Speaker", "Utterance"]

API = 1


@frozen(eq=False, kw_only=True)
class Utterance:
    """A request for the engine.

    tokens: the prompt. params: fields of SamplingParams that the model needs where the client sets
    none.
    """

    tokens: Sequence[int]
    params: Mapping[str, Any] = field(factory=dict)


@frozen(eq=False, kw_only=True)
class Answer:
    """An answer in text that is to be spoken.

    prompt, tokens: of the conversation and of the answer. states: of the tokens in
    `Speaker.states_of`, [n, width]; None if there are none. Those of the answer's last token may be
    missing. positions, offset: of the prompt, as in `modulm.contracts.requests.Request`.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    states: np.ndarray | None = None
    positions: np.ndarray | None = None
    offset: int = 0


class Speaker(ABC):
    """How one model is prompted.

    tokenizer: the engine's. path: the checkpoint's folder. config: its config.json.
    """

    api: ClassVar[int | tuple[int, int]] = API
    #: Whether it uses instructions about how to speak.
    takes_instructions: bool = False
    #: Whether it speaks answers of the text model that is loaded with it. Its requests then have a
    #: `modulm_speakers.script.Script`, and defaults of texts do not apply to them.
    speaks_answers: bool = False
    #: Whether it reads texts aloud that are no answers (`ask`).
    reads_texts: bool = True

    def __init__(self, tokenizer: Tokenizer, path: Path, config: Mapping[str, Any]) -> None:
        self.tokenizer, self.path, self.config = tokenizer, path, config

    @property
    @abstractmethod
    def voices(self) -> Sequence[str]:
        """Names of the voices, the default one first."""

    @abstractmethod
    def ask(self, text: str, voice: str, instructions: str = "") -> Utterance:
        """Build the request for reading `text` in one of the `voices`.

        Text of clients must not become control tokens.
        """

    def states_of(self, prompt: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Return the ranges [start, end) of tokens, of a conversation and of the answer after it,
        whose states `reply` needs.
        """
        return ()

    def reply(self, answer: Answer, voice: str) -> Utterance | None:
        """Build the request for speaking an answer; None if there is nothing to say.

        Raises UnsupportedError unless `speaks_answers`.
        """
        raise UnsupportedError(f"{type(self).__name__} does not speak answers of a text model")
