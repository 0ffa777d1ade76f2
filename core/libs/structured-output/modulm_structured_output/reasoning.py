"""Grammars that start after the model's reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from modulm.contracts.grammar import Grammar, Matcher
from modulm.contracts.parser import Content, ParseContext, ReasoningParser
from modulm_tokenizers.detokenizer import Detokenizer

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.tokenizer import Tokenizer
    from modulm.plugins.manager import PluginManager

__all__ = ["AfterReasoning", "Gate", "breaks_of", "gate_for", "openers_of"]

#: (grammar, prompt [tokens] int64) -> grammar.
Gate = Callable[[Grammar, np.ndarray], Grammar]
_ParserMaker = Callable[[ParseContext], ReasoningParser]
#: Number of final prompt tokens that show whether the template has opened the reasoning.
_TAIL = 32
#: A text that does not end the reasoning.
_THOUGHT = "Hm"


class AfterReasoning(Grammar):
    """Allows any token during the reasoning, as detected by the reasoning parser, then a grammar.

    If the prompt does not open the reasoning, the first token decides: tokens that open it
    (`openers`) are allowed in addition to the grammar's. A token that ends the reasoning and is
    part of the answer (`breaks`: the marker of a tool call) must be accepted by the grammar.
    """

    def __init__(
        self,
        grammar: Grammar,
        make: _ParserMaker,
        tokenizer: Tokenizer,
        prompt: Sequence[int] | np.ndarray,
        openers: Sequence[int],
        breaks: Sequence[int] = (),
    ) -> None:
        self.breaks = tuple(breaks)
        self.grammar = grammar
        self.make = make
        self.tokenizer = tokenizer
        self.context = _reasoning_start(tokenizer, prompt)
        self.openers = tuple(
            token for token in openers
            if _opens(make(self.context), token, tokenizer.id_to_token(token) or "")
        )  # fmt: skip

    def matcher(self) -> Matcher:
        return _GatedMatcher(self)


def gate_for(
    config: EngineConfig, tokenizer: Tokenizer, vocabulary: int, plugins: PluginManager
) -> Gate | None:
    """Return the function that delays a grammar until the end of the reasoning.

    None if no reasoning parser is set, or if the grammar applies to the reasoning as well.
    """
    settings = config.structured_outputs
    if not settings.reasoning_parser or settings.enable_in_reasoning:
        return None
    make: _ParserMaker = plugins.load("reasoning_parsers", settings.reasoning_parser)
    openers = openers_of(make, tokenizer, vocabulary)
    breaks = breaks_of(make, tokenizer, vocabulary, openers)
    return lambda grammar, prompt: AfterReasoning(grammar, make, tokenizer, prompt, openers, breaks)


def _reasoning_start(tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray) -> ParseContext:
    """Return the context of a reasoning parser, with the end of the prompt."""
    tail = [int(token) for token in prompt[-_TAIL:]]
    text = tokenizer.decode(tail, skip_special_tokens=False)
    return ParseContext(prompt_tail=text, tokenizer=tokenizer)


def openers_of(make: _ParserMaker, tokenizer: Tokenizer, vocabulary: int) -> tuple[int, ...]:
    """Return added tokens that start the reasoning if they come first."""
    openers = []
    for text, index in sorted(tokenizer.added_tokens.items(), key=lambda item: item[1]):
        bare = len(text) < 3 or not (text.startswith(("<", "[")) and text.endswith((">", "]")))
        if bare or index >= vocabulary:
            continue
        if _opens(make(ParseContext(prompt_tail="", tokenizer=tokenizer)), index, text):
            openers.append(index)
    return tuple(openers)


def breaks_of(
    make: _ParserMaker, tokenizer: Tokenizer, vocabulary: int, openers: Sequence[int]
) -> tuple[int, ...]:
    """Return added tokens that end the reasoning and are part of the answer."""

    def thinking() -> ReasoningParser | None:
        parser = make(ParseContext(tokenizer=tokenizer))
        if not parser.reasoning and openers:
            parser.feed(tokenizer.id_to_token(openers[0]) or "", [openers[0]])
        parser.feed(_THOUGHT, tokenizer.encode(_THOUGHT, False))
        return parser if parser.reasoning else None

    breaks = []
    for text, index in tokenizer.added_tokens.items():
        parser = thinking() if index < vocabulary else None
        if parser is not None:
            events = parser.feed(text, [index])
            if not parser.reasoning and any(isinstance(event, Content) for event in events):
                breaks.append(index)
    return tuple(breaks)


def _opens(parser: ReasoningParser, token: int, text: str) -> bool:
    """Whether `token` starts the reasoning if it comes first."""
    parser.feed(text, [token])
    return parser.reasoning


class _GatedMatcher(Matcher):
    """Allows any token during reasoning, then follows the inner matcher.

    `_taken` records for each token which of the two accepted it.
    """

    def __init__(self, of: AfterReasoning) -> None:
        self._of = of
        self._inner = of.grammar.matcher()
        self._parser = of.make(of.context)
        self._detokenizer = Detokenizer(of.tokenizer, skip_special_tokens=False)
        self._thinking = self._parser.reasoning
        self._first = not self._thinking and bool(of.openers)
        self._free: list[int] = []
        self._held = 0
        self._broken = False
        self._banned: np.ndarray | None = None

    def accept(self, token: int) -> bool:
        opens = self._first and token in self._of.openers
        self._first = False
        if self._thinking and token in self._of.breaks:
            self._broken = self._inner.accept(token)
            self._thinking, self._held = not self._broken, int(self._broken)
            return self._broken
        if not self._thinking and not opens:
            accepted = self._inner.accept(token)
            self._held += accepted
            return accepted
        self._free.append(token)
        self._parser.feed(self._detokenizer.feed([token]), [token])
        self._thinking = self._parser.reasoning
        return True

    def fill(self, mask: np.ndarray) -> None:
        if self._thinking:
            mask.fill(-1)
            if self._of.breaks:
                mask &= self._unbroken(mask)
            return
        self._inner.fill(mask)
        if self._first:
            for token in self._of.openers:
                mask.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))

    def _unbroken(self, mask: np.ndarray) -> np.ndarray:
        """Remove the breaks that the grammar does not accept first from a mask."""
        if self._banned is None:
            begins = np.empty_like(mask)
            self._inner.fill(begins)
            self._banned = np.full_like(mask, -1)
            bits, first = self._banned.view(np.uint32), begins.view(np.uint32)
            for token in self._of.breaks:
                bit = np.uint32(1 << (token % 32))
                bits[token // 32] &= ~bit | first[token // 32]
        return self._banned

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """During reasoning, all: looking ahead and returning would replay it from its start."""
        if self._thinking or self._first:
            return len(tokens)
        return self._inner.count_allowed(tokens)

    def forced(self) -> Sequence[int]:
        return () if self._thinking or self._first else self._inner.forced()

    def rollback(self, tokens: int) -> None:
        """Roll back the inner matcher; tokens of the reasoning are replayed from its start."""
        inside = min(tokens, self._held)
        self._inner.rollback(inside)
        self._held -= inside
        if inside < tokens or (self._broken and not self._held):
            again = self._free[: len(self._free) - (tokens - inside)]
            fresh = _GatedMatcher(self._of)
            for token in again:
                fresh.accept(token)
            self.__dict__.update(fresh.__dict__)

    @property
    def finished(self) -> bool:
        return not self._thinking and self._inner.finished
