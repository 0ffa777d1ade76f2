"""A grammar that waits until the model has finished thinking."""

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

#: A grammar and a prompt [tokens] int64 -> a grammar.
Gate = Callable[[Grammar, np.ndarray], Grammar]
_ParserMaker = Callable[[ParseContext], ReasoningParser]
#: Prompt tokens whose text says whether the template has opened the reasoning already.
_TAIL = 32
#: A text that ends no thought.
_THOUGHT = "Hm"


class AfterReasoning(Grammar):
    """Anything goes while the reasoning parser says that the model thinks; then the grammar.

    Where the prompt leaves it open, the first token decides: one that opens the reasoning
    (`openers`) is allowed beside those of the grammar. A token that ends the reasoning by being
    part of the answer (`breaks`: the marker of a call) is the grammar's first one, or not allowed.
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
    """What turns a grammar, and a prompt, into one that waits for the reasoning's end.

    None where no reasoning parser is set, or where the reasoning is held to the grammar as well.
    """
    settings = config.structured_outputs
    if not settings.reasoning_parser or settings.enable_in_reasoning:
        return None
    make: _ParserMaker = plugins.load("reasoning_parsers", settings.reasoning_parser)
    openers = openers_of(make, tokenizer, vocabulary)
    breaks = breaks_of(make, tokenizer, vocabulary, openers)
    return lambda grammar, prompt: AfterReasoning(grammar, make, tokenizer, prompt, openers, breaks)


def _reasoning_start(tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray) -> ParseContext:
    """What a reasoning parser may know before the first token."""
    tail = [int(token) for token in prompt[-_TAIL:]]
    text = tokenizer.decode(tail, skip_special_tokens=False)
    return ParseContext(prompt_tail=text, tokenizer=tokenizer)


def openers_of(make: _ParserMaker, tokenizer: Tokenizer, vocabulary: int) -> tuple[int, ...]:
    """Added tokens that, as the first thing said, begin the reasoning."""
    found = []
    for text, index in sorted(tokenizer.added_tokens.items(), key=lambda item: item[1]):
        bare = len(text) < 3 or not (text.startswith(("<", "[")) and text.endswith((">", "]")))
        if bare or index >= vocabulary:
            continue
        if _opens(make(ParseContext(prompt_tail="", tokenizer=tokenizer)), index, text):
            found.append(index)
    return tuple(found)


def breaks_of(
    make: _ParserMaker, tokenizer: Tokenizer, vocabulary: int, openers: Sequence[int]
) -> tuple[int, ...]:
    """Added tokens that end the reasoning and are themselves text of the answer."""

    def thinking() -> ReasoningParser | None:
        parser = make(ParseContext(tokenizer=tokenizer))
        if not parser.reasoning and openers:
            parser.feed(tokenizer.id_to_token(openers[0]) or "", [openers[0]])
        parser.feed(_THOUGHT, tokenizer.encode(_THOUGHT, False))
        return parser if parser.reasoning else None

    found = []
    for text, index in tokenizer.added_tokens.items():
        parser = thinking() if index < vocabulary else None
        if parser is not None:
            events = parser.feed(text, [index])
            if not parser.reasoning and any(isinstance(event, Content) for event in events):
                found.append(index)
    return tuple(found)


def _opens(parser: ReasoningParser, token: int, text: str) -> bool:
    """Whether `token`, said first, begins the reasoning."""
    parser.feed(text, [token])
    return parser.reasoning


class _GatedMatcher(Matcher):
    """Free while thinking, then the inner matcher. `_taken` tells, token by token, which it was."""

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
        """A mask without the breaks with which the grammar does not begin."""
        if self._banned is None:
            begins = np.empty_like(mask)
            self._inner.fill(begins)
            self._banned = np.full_like(mask, -1)
            bits, first = self._banned.view(np.uint32), begins.view(np.uint32)
            for token in self._of.breaks:
                bit = np.uint32(1 << (token % 32))
                bits[token // 32] &= ~bit | first[token // 32]
        return self._banned

    def rollback(self, tokens: int) -> None:
        """Inside the grammar directly; the thought is taken back by thinking it again."""
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
