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

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["API", "Speaker", "Utterance"]

API = 1


@frozen(eq=False, kw_only=True)
class Utterance:
    """A request for the engine.

    tokens: the prompt. params: fields of SamplingParams that the model needs where the client sets
    none.
    """

    tokens: Sequence[int]
    params: Mapping[str, Any] = field(factory=dict)


class Speaker(ABC):
    """How one model is prompted.

    tokenizer: the engine's. path: the checkpoint's folder. config: its config.json.
    """

    api: ClassVar[int | tuple[int, int]] = API
    #: Whether it uses instructions about how to speak.
    takes_instructions: bool = False

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
