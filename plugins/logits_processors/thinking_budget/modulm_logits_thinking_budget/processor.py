"""Thoughts that may have so many tokens: what ends one is written where the budget is spent.

The parsers that take thoughts and calls out of answers also tell here, token by token, whether
the row thinks and what would end the thought. Nothing but a row's tokens decides, so that it is
the same with drafts, after a preemption and in every batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock, Thread
from typing import TYPE_CHECKING, Self

from attrs import define, field

from modulm.contracts.parser import ParseContext, ReasoningParser
from modulm.contracts.sampling import LogitsProcessor, RowView, SamplingParams
from modulm.engine.sampling.validation import check_ids
from modulm.errors import ConfigError, RequestError
from modulm.loading import open_checkpoint
from modulm.loading.tokenizer import open_tokenizer
from modulm.plugins import manager
from modulm.text.detokenizer import Detokenizer
from modulm_logits_thinking_budget.flags import ReasoningConfig
from modulm_parsing import MessageParser, Thoughts, message_parser

if TYPE_CHECKING:
    import torch

    from modulm.config import EngineConfig
    from modulm.text.tokenizer import Tokenizer

__all__ = ["Reading", "Row", "ThinkingBudget"]

_FIELD = "thinking_token_budget"
#: Tokens of the prompt's end whose text says whether a thought is open.
_TAIL = 128


class ThinkingBudget(LogitsProcessor):
    """Ends the thoughts of rows whose `thinking_token_budget` is spent."""

    api = 1
    fields = (_FIELD,)

    def __init__(
        self, vocabulary: int, device: torch.device, reading: Reading | None = None
    ) -> None:
        super().__init__(vocabulary, device)
        self._reading = reading
        self._rows: dict[int, Row] = {}

    @classmethod
    def open(cls, config: EngineConfig, vocabulary: int, device: torch.device) -> Self:
        reading = Reading(config, vocabulary)
        if config.group(ReasoningConfig) != ReasoningConfig():
            _check_strings(config)
            # Who sets it will use it: nobody is to wait for the tokenizer then.
            Thread(target=reading.warm, name="modulm-thinking-budget", daemon=True).start()
        return cls(vocabulary, device, reading)

    @classmethod
    def validate_for(cls, params: SamplingParams, config: EngineConfig | None) -> None:
        if config is not None and _budget(params) is not None:
            _check_config(config)

    def admit(self, view: RowView) -> bool:
        budget = _budget(view.params)
        if budget is None:
            return False
        if self._reading is None:
            raise RequestError(f"{_FIELD}: nothing here reads thoughts", _FIELD)
        self._rows[view.row] = Row(self._reading, budget, self._reading.parser(view.prompt))
        return True

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        token = self._rows[view.row].forced(view.output)
        if token is not None:
            logits.fill_(float("-inf"))
            logits[token] = 0.0
        return logits


@define(eq=False)
class Reading:
    """What is shared by all rows: the tokenizer, loaded when first needed, and what ends thoughts.

    vocabulary: width of the logits.
    """

    config: EngineConfig
    vocabulary: int
    _endings: dict[str, tuple[int, ...]] = field(factory=dict)
    _lock: Lock = field(factory=Lock)
    _tokenizer: Tokenizer | None = None

    def warm(self) -> None:
        """Load the tokenizer; what is wrong with it is told by who needs it."""
        try:
            _ = self.tokenizer
        except Exception:
            return

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError on an engine without one."""
        with self._lock:
            if self._tokenizer is None:
                checkpoint = open_checkpoint(self.config, manager.current())
                self._tokenizer = open_tokenizer(self.config, str(checkpoint.path))
            if self._tokenizer is None:
                raise RequestError(f"{_FIELD} needs a tokenizer", _FIELD)
            return self._tokenizer

    @property
    def said(self) -> str:
        """What is said instead of what the parser would end a thought with; "" for that."""
        return self.config.group(ReasoningConfig).reasoning_end_str

    def parser(self, prompt: Sequence[int]) -> MessageParser:
        """What reads an answer to the prompt. Raises RequestError where nothing can."""
        _check_config(self.config)
        tokenizer = self.tokenizer
        tail = tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
        context = ParseContext(prompt_tail=tail, tokenizer=tokenizer)
        parser = _known_parser(self.config)
        if parser is None:
            return MessageParser(None, _tagged(self.config)(context))
        return message_parser(context, self.config.tool_calls.tool_call_parser, parser.name)

    def ending(self, text: str) -> tuple[int, ...]:
        """The tokens of what ends a thought."""
        known = self._endings.get(text)
        if known is None:
            ids = self.tokenizer.encode(self.said or text, add_special_tokens=False)
            check_ids(_FIELD, ids, self.vocabulary)
            known = self._endings[text] = tuple(ids)
        return known


@define(eq=False)
class Row:
    """How far a row is. `spent`: tokens that were thoughts; `settled`: whether the parser has seen
    a token since the last forced one, which may open what it cannot tell before.
    """

    reading: Reading
    budget: int
    parser: MessageParser
    seen: int = 0
    spent: int = 0
    settled: bool = True
    tail: deque[int] = field(factory=lambda: deque(maxlen=_TAIL))
    ahead: list[int] = field(factory=list)
    detokenizer: Detokenizer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.detokenizer = Detokenizer(self.reading.tokenizer, skip_special_tokens=False)
        self._decide()

    def forced(self, output: Sequence[int]) -> int | None:
        """The token that has to come after `output`, or None if any may."""
        for token in output[self.seen :]:
            self._take(token)
        self.seen = len(output)
        return self.ahead[0] if self.ahead else None

    def _take(self, token: int) -> None:
        thinks = self.parser.reasoning_end is not None
        self.parser.feed(self.detokenizer.feed([token]), [token])
        if self.ahead:
            self.settled = False
            self.ahead.pop(0)
        else:
            self.settled = True
            # What opens or closes a thought is no part of it.
            self.spent += thinks and self.parser.reasoning_end is not None
            self.tail.append(token)
        self._decide()

    def _decide(self) -> None:
        if self.ahead or not self.settled or self.spent < self.budget:
            return
        text = self.parser.reasoning_end
        if text is not None:
            ending = self.reading.ending(text)
            self.ahead = list(ending[_begun(self.tail, ending) :])
            self.tail.clear()


def _budget(params: SamplingParams) -> int | None:
    """Tokens that thoughts may have; -1 is no bound, as None."""
    return None if params.thinking_token_budget == -1 else params.thinking_token_budget


def _begun(tail: Sequence[int], ending: tuple[int, ...]) -> int:
    """How many tokens of the ending the model has just written by itself."""
    last = tuple(tail)
    counts = range(min(len(last), len(ending) - 1), 0, -1)
    return next((count for count in counts if last[-count:] == ending[:count]), 0)


def _known_parser(config: EngineConfig) -> type[ReasoningParser] | None:
    """The engine's reasoning parser, if it tells how a thought ends."""
    name = config.structured_outputs.reasoning_parser
    if not name:
        return None
    found: type[ReasoningParser] = manager.current().load("reasoning_parsers", name)
    return found if found.tells_end else None


def _check_config(config: EngineConfig) -> None:
    """Raise RequestError for an engine that cannot tell where thoughts begin and end."""
    given = config.group(ReasoningConfig)
    if (given.reasoning_start_str and given.reasoning_end_str) or _known_parser(config):
        return
    name = config.structured_outputs.reasoning_parser
    lacks = f"reasoning parser {name} does not tell how a thought ends" if name else (
        "there is no reasoning parser here (--reasoning-parser)"
    )  # fmt: skip
    words = "--reasoning-config would need reasoning_start_str and reasoning_end_str"
    raise RequestError(f"{_FIELD}: {lacks}; without one, {words}", _FIELD)


def _check_strings(config: EngineConfig) -> None:
    """Raise ConfigError for strings that the reasoning parser does not understand."""
    given, parser = config.group(ReasoningConfig), _known_parser(config)
    if parser is None:
        return
    opening, ending = given.reasoning_start_str, given.reasoning_end_str
    reader = parser(ParseContext(prompt_tail=""))
    reader.feed(f"{opening}a")
    if opening and not reader.reasoning:
        raise _unread("reasoning_start_str", opening, parser)
    for example in parser.examples if ending else ():
        thought, found, _ = example.text.partition(example.reasoning or "\0")
        if found:
            reader = parser(example.context)
            reader.feed(f"{thought}{found}{ending}")
            reader.feed("b")
            if reader.reasoning_end is not None:
                raise _unread("reasoning_end_str", ending, parser)


def _unread(name: str, text: str, parser: type[ReasoningParser]) -> ConfigError:
    words = f"{name} {text[:64]!r} is none that reasoning parser {parser.name} reads"
    return ConfigError("reasoning_config", words)


def _tagged(config: EngineConfig) -> type[Thoughts]:
    """What reads thoughts between the strings of the configuration."""
    given = config.group(ReasoningConfig)
    tags = {"opening": (given.reasoning_start_str,), "closing": (given.reasoning_end_str,)}
    return type("Tagged", (Thoughts,), {"name": "tagged", "api": 1, "anywhere": True, **tags})
