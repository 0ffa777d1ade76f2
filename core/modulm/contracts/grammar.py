"""Grammar backend: constrains text to a format (group `modulm.grammars`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from modulm.contracts.sampling import StructuredOutputs
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["API", "Grammar", "GrammarBackend", "Matcher"]

API = 1


class Matcher(ABC):
    """The position of one sequence in a grammar."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Advance by a token; False (and no change) if the grammar does not allow it."""

    @abstractmethod
    def fill(self, mask: np.ndarray) -> None:
        """Fill the bit mask of allowed next tokens.

        mask: [ceil(vocabulary / 32)] int32; bit i of word j is set if token 32 j + i is allowed.
        Bits past the vocabulary are ignored.
        """

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens may follow, before the first that may not; no change.

        It may return too many: drafts that are not allowed are rejected when they are verified.
        """
        count = 0
        try:
            while count < len(tokens) and self.accept(tokens[count]):
                count += 1
        finally:
            self.rollback(count)
        return count

    def forced(self) -> Sequence[int]:
        """Return tokens that probably follow, because the grammar allows only one text here.

        They are drafts: each is verified, so a text that has several tokenizations is no problem.
        """
        return ()

    @abstractmethod
    def rollback(self, tokens: int) -> None:
        """Undo the last `tokens` accepted tokens."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether only an end-of-sequence token may follow."""


class Grammar(ABC):
    """A compiled constraint, shared by all sequences that use it. nbytes: its memory."""

    nbytes: int = 0

    @abstractmethod
    def matcher(self) -> Matcher:
        """Create a matcher at the start of the grammar."""


class GrammarBackend(ABC):
    """Compiles constraints for one tokenizer, in background threads.

    tokenizer: the model's. vocabulary: width of the logits. stop_ids: tokens that may end a text
    once the grammar is complete.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: With automatic choice, backends are tried in descending order of this number.
    preference: ClassVar[int] = 0

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_ids: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.stop_ids = stop_ids

    @abstractmethod
    def rejects(self, constraint: StructuredOutputs) -> str | None:
        """Return why this backend cannot express the constraint, or None. Must be fast."""

    @abstractmethod
    def compile(self, constraint: StructuredOutputs) -> Grammar:
        """Compile a constraint. Raises RequestError for a malformed schema, regex or grammar."""
