"""Thinking budgets: limit the number of reasoning tokens, then force the end of reasoning.

The parsers that extract reasoning and tool calls from answers also report, token by token, whether
the row is reasoning and which text would end it. The decision depends on a row's tokens only, so it
is the same with speculative decoding, after a preemption and in every batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock, Thread
from typing import TYPE_CHECKING, Self

from attrs import define, field

from modulm.contracts.parser import ParseContext, ReasoningParser
from modulm.contracts.sampling import LogitsProcessor, RowView, SamplingParams
from modulm.errors import ConfigError, RequestError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm_logits_thinking_budget.flags import ReasoningConfig
from modulm_parsing import MessageParser, Thoughts, message_parser
from modulm_tokenizers.detokenizer import Detokenizer
from modulm_tokenizers.tokenizer import open_tokenizer

if TYPE_CHECKING:
    import torch

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["Reading", "Row", "ThinkingBudget"]

_FIELD = "thinking_token_budget"
#: Number of tokens at the prompt's end whose text shows whether reasoning is open.
_TAIL = 128


class ThinkingBudget(LogitsProcessor):
    """Ends the reasoning of rows that have used up their `thinking_token_budget`."""

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
            # The flag is set to be used: load the tokenizer now, so that no request waits for it.
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
            raise RequestError(f"{_FIELD}: no reasoning parser is configured", _FIELD)
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
    """Shared by all rows: the tokenizer, loaded on first use, and the texts that end reasoning.

    vocabulary: width of the logits.
    """

    config: EngineConfig
    vocabulary: int
    _endings: dict[str, tuple[int, ...]] = field(factory=dict)
    _lock: Lock = field(factory=Lock)
    _tokenizer: Tokenizer | None = None

    def warm(self) -> None:
        """Load the tokenizer; errors are raised later, to the request that needs it."""
        try:
            _ = self.tokenizer
        except Exception:
            return

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError if the engine has none."""
        with self._lock:
            if self._tokenizer is None:
                checkpoint = open_checkpoint(self.config, manager.current())
                self._tokenizer = open_tokenizer(self.config, str(checkpoint.path))
            if self._tokenizer is None:
                raise RequestError(f"{_FIELD} needs a tokenizer", _FIELD)
            return self._tokenizer

    @property
    def end_text(self) -> str:
        """The configured end of reasoning; "" for the parser's."""
        return self.config.group(ReasoningConfig).reasoning_end_str

    def parser(self, prompt: Sequence[int]) -> MessageParser:
        """Return a parser for an answer to the prompt. Raises RequestError if there is none."""
        _check_config(self.config)
        tokenizer = self.tokenizer
        tail = tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
        context = ParseContext(prompt_tail=tail, tokenizer=tokenizer)
        parser = _known_parser(self.config)
        if parser is None:
            return MessageParser(None, _tagged(self.config)(context))
        return message_parser(context, self.config.tool_calls.tool_call_parser, parser.name)

    def ending(self, text: str) -> tuple[int, ...]:
        """Return the tokens that end reasoning."""
        known = self._endings.get(text)
        if known is None:
            ids = self.tokenizer.encode(self.end_text or text, add_special_tokens=False)
            wrong = [token for token in ids if token >= self.vocabulary][:1]
            if wrong:
                raise RequestError(
                    f"{_FIELD} holds {wrong[0]}, which is not a token id of the model "
                    f"(0 to {self.vocabulary - 1})",
                    _FIELD,
                )
            known = self._endings[text] = tuple(ids)
        return known


@define(eq=False)
class Row:
    """State of a row.

    `reasoning_tokens`: generated so far. `settled`: whether the parser has seen a token since the
    last forced one, which may open reasoning unnoticed.
    """

    reading: Reading
    budget: int
    parser: MessageParser
    seen: int = 0
    reasoning_tokens: int = 0
    settled: bool = True
    tail: deque[int] = field(factory=lambda: deque(maxlen=_TAIL))
    ahead: list[int] = field(factory=list)
    detokenizer: Detokenizer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.detokenizer = Detokenizer(self.reading.tokenizer, skip_special_tokens=False)
        self._decide()

    def forced(self, output: Sequence[int]) -> int | None:
        """Return the token that must follow `output`, or None."""
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
            # The strings that open and close reasoning do not count.
            self.reasoning_tokens += thinks and self.parser.reasoning_end is not None
            self.tail.append(token)
        self._decide()

    def _decide(self) -> None:
        if self.ahead or not self.settled or self.reasoning_tokens < self.budget:
            return
        text = self.parser.reasoning_end
        if text is not None:
            ending = self.reading.ending(text)
            self.ahead = list(ending[_written(self.tail, ending) :])
            self.tail.clear()


def _budget(params: SamplingParams) -> int | None:
    """Return the maximum number of reasoning tokens; None or -1 for no limit."""
    return None if params.thinking_token_budget == -1 else params.thinking_token_budget


def _written(tail: Sequence[int], ending: tuple[int, ...]) -> int:
    """Return how many tokens of the ending the model has just generated itself."""
    last = tuple(tail)
    counts = range(min(len(last), len(ending) - 1), 0, -1)
    return next((count for count in counts if last[-count:] == ending[:count]), 0)


def _known_parser(config: EngineConfig) -> type[ReasoningParser] | None:
    """Return the engine's reasoning parser, if it reports how reasoning ends."""
    name = config.structured_outputs.reasoning_parser
    if not name:
        return None
    parser: type[ReasoningParser] = manager.current().load("reasoning_parsers", name)
    return parser if parser.tells_end else None


def _check_config(config: EngineConfig) -> None:
    """Raise RequestError if the engine cannot detect where reasoning begins and ends."""
    reasoning = config.group(ReasoningConfig)
    if (reasoning.reasoning_start_str and reasoning.reasoning_end_str) or _known_parser(config):
        return
    name = config.structured_outputs.reasoning_parser
    lacks = f"reasoning parser {name} does not report how reasoning ends" if name else (
        "no reasoning parser is configured (--reasoning-parser)"
    )  # fmt: skip
    advice = "set reasoning_start_str and reasoning_end_str in --reasoning-config"
    raise RequestError(f"{_FIELD}: {lacks}; {advice}", _FIELD)


def _check_strings(config: EngineConfig) -> None:
    """Raise ConfigError for strings that the reasoning parser does not recognise."""
    reasoning, parser = config.group(ReasoningConfig), _known_parser(config)
    if parser is None:
        return
    opening, ending = reasoning.reasoning_start_str, reasoning.reasoning_end_str
    reader = parser(ParseContext(prompt_tail=""))
    reader.feed(f"{opening}a")
    if opening and not reader.reasoning:
        raise _unread("reasoning_start_str", opening, parser)
    for example in parser.examples if ending else ():
        thought, content, _ = example.text.partition(example.reasoning or "\0")
        if content:
            reader = parser(example.context)
            reader.feed(f"{thought}{content}{ending}")
            reader.feed("b")
            if reader.reasoning_end is not None:
                raise _unread("reasoning_end_str", ending, parser)


def _unread(name: str, text: str, parser: type[ReasoningParser]) -> ConfigError:
    message = f"{name} {text[:64]!r} is not recognised by reasoning parser {parser.name}"
    return ConfigError("reasoning_config", message)


def _tagged(config: EngineConfig) -> type[Thoughts]:
    """Return a parser for reasoning between the configured strings."""
    reasoning = config.group(ReasoningConfig)
    tags = {"opening": (reasoning.reasoning_start_str,), "closing": (reasoning.reasoning_end_str,)}
    return type("Tagged", (Thoughts,), {"name": "tagged", "api": 1, "anywhere": True, **tags})
