"""Grammar backend: constrains text to a format (group `modulm.grammars`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import numpy as np

    from modulm.contracts.sampling import StructuredOutputs
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["API", "Grammar", "GrammarBackend", "Matcher"]

API = 1


class Matcher(ABC):
    """Where one sequence stands in a grammar."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Advance by a token; False (and no change) if the grammar does not allow it."""

    @abstractmethod
    def fill(self, mask: np.ndarray) -> None:
        """mask: [ceil(vocabulary / 32)] int32; bit i of word j: token 32 j + i is allowed.

        Bits past the vocabulary mean nothing.
        """

    @abstractmethod
    def rollback(self, tokens: int) -> None:
        """Take back the last tokens that were accepted."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether only an end-of-sequence token may follow."""


class Grammar(ABC):
    """A compiled constraint, shared by all sequences that use it. nbytes: what it takes."""

    nbytes: int = 0

    @abstractmethod
    def matcher(self) -> Matcher:
        """A fresh matcher at the start of the grammar."""


class GrammarBackend(ABC):
    """Compiles constraints for one tokenizer. Compiling happens off the step loop, in a thread.

    tokenizer: of the model; vocabulary: width of the logits; stop_ids: ids
    that may end a text where the grammar is complete.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: Where the choice is automatic, the backend with the highest number is asked first.
    preference: ClassVar[int] = 0

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.stop_ids = stop_ids

    @abstractmethod
    def rejects(self, constraint: StructuredOutputs) -> str | None:
        """A reason why this backend cannot express the constraint, or None. Must be quick."""

    @abstractmethod
    def compile(self, constraint: StructuredOutputs) -> Grammar:
        """Compile. Raises RequestError for a malformed schema, regex or grammar."""
