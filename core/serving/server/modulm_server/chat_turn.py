"""One turn of a conversation: the code that all chat APIs share.

A turn is a prompt, sampling parameters and the parsers of the model's output. It yields parsed
deltas for each choice, which an API converts to its own format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, evolve, field, frozen

from modulm.contracts.parser import Content, ParseContext, Reasoning, ToolStart
from modulm.contracts.sampling import OutputKind
from modulm_expert_routes import chosen_experts
from modulm_frontend.beam_search import BeamSearchParams
from modulm_parsing import ParsedMessage, assemble, message_parser
from modulm_server.errors import ApiError
from modulm_server.flags import ServerConfig
from modulm_server.json_body import bad_field

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.outputs import CompletionOutput, Position, RequestOutput
    from modulm.contracts.parser import Event
    from modulm.contracts.sampling import SamplingParams
    from modulm_parsing import MessageParser
    from modulm_server.generation import GenerationService, Running
    from modulm_server.prompts import Prompt

__all__ = ["ChatTurn", "Delta", "Message", "Parsers", "RunningTurn"]

#: Characters of the prompt's end that a parser gets.
_TAIL = 512
#: Characters of thoughts up to which their tokens are counted on the event loop.
_SHORT = 4_096


@frozen
class Parsers:
    """The names of the server's parsers. `tool_choice: auto` needs a tool parser. strict_level:
    `--tool-strict-level`.
    """

    tool: str | None = None
    reasoning: str | None = None
    strict_level: str = "auto"

    @classmethod
    def of(cls, config: EngineConfig) -> Parsers:
        """The parsers of a configuration."""
        return cls(
            config.tool_calls.tool_call_parser,
            config.structured_outputs.reasoning_parser,
            config.group(ServerConfig).tool_strict_level,
        )


@frozen(kw_only=True)
class Delta:
    """New output of one choice.

    generated: tokens of the choice so far, including hidden thoughts. token_ids, logprobs: of the
    shown tokens only.
    """

    index: int
    events: Sequence[Event]
    token_ids: Sequence[int]
    logprobs: Sequence[Position] | None
    finish_reason: str | None
    stop_reason: int | str | None
    generated: int
    weight_versions: Sequence[tuple[int, int, int]] = ()
    routed_experts: np.ndarray | None = None


@frozen(kw_only=True)
class Message:
    """A complete choice. generated: all tokens; token_ids, logprobs: of the shown tokens only."""

    index: int
    parsed: ParsedMessage
    generated: int
    token_ids: Sequence[int]
    logprobs: Sequence[Position] | None
    finish_reason: str
    stop_reason: int | str | None
    weight_versions: Sequence[tuple[int, int, int]] = ()
    routed_experts: np.ndarray | None = None


@frozen(kw_only=True)
class ChatTurn:
    """A turn that is ready to run.

    tools: in OpenAI's form. tool_choice: as in OpenAI's API. allowed: names of the tools that may
    be called, None for all; calls of other tools are dropped. calls_by_grammar: a grammar enforces
    the calls, in the model's own format. reasoning: show thoughts. tokens: show token ids or
    logprobs. fields: the API's names of engine fields, for errors. adapter: from
    `GenerationService.find_model`.
    """

    generation: GenerationService
    prompt: Prompt
    params: SamplingParams | BeamSearchParams
    parsers: Parsers
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "none"
    allowed: frozenset[str] | None = None
    calls_by_grammar: bool = False
    reasoning: bool = True
    tokens: bool = False
    template_kwargs: Mapping[str, Any] = field(factory=dict)
    fields: Mapping[str, str] = field(factory=dict)
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    api: str = "chat"

    def check(self) -> None:
        """Raise ApiError(400) if the model may call tools and the server has no tool parser."""
        if self.tools and self.tool_choice == "auto" and not self.parsers.tool:
            raise ApiError(
                400,
                'tool_choice "auto" needs a tool parser: start the server with --tool-call-parser '
                "and a name from `modulm plugins list tool_parsers`",
                param="tool_choice",
            )

    def parser(self) -> MessageParser:
        """Create a parser for one choice."""
        text = self.prompt.text
        server = self.generation.config.group(ServerConfig)
        forced = self.tool_choice == "required" or isinstance(self.tool_choice, Mapping)
        reads = forced or (bool(self.tools) and self.tool_choice != "none")
        context = ParseContext(
            tools=tuple(self.tools),
            tool_choice=self.tool_choice if reads else "none",
            template_kwargs={**(server.default_chat_template_kwargs or {}), **self.template_kwargs},
            prompt_tail=text[-_TAIL:] if text is not None else "",
            tokenizer=self.generation.tokenizer,
            grammar_enforced=self.calls_by_grammar,
        )
        return message_parser(
            context,
            self.parsers.tool if reads else None,
            self.parsers.reasoning,
        )

    def engine_params(self) -> SamplingParams | BeamSearchParams:
        """The parameters for the engine: special tokens are kept if a parser needs them."""
        params = self.params
        if params.skip_special_tokens and self.parser().special_tokens:
            params = params.with_(skip_special_tokens=False)
        if self.reasoning or not self.tokens or isinstance(params, BeamSearchParams):
            return params
        # Only deltas show which tokens are thoughts.
        return params.with_(output_kind=OutputKind.DELTA)

    async def start(self) -> RunningTurn:
        """Submit the turn to the engine. Raises if the engine rejects it."""
        params = self.engine_params()
        streamed = False
        if not isinstance(params, BeamSearchParams):
            streamed = params.output_kind is OutputKind.DELTA
            if streamed and (params.best_of or 0) > params.n:
                raise bad_field(
                    "include_reasoning",
                    "include_reasoning: false is not supported with best_of and token ids or "
                    "logprobs",
                )
        running = await self.generation.generate(
            self.prompt,
            params,
            priority=self.priority,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            fields=self.fields,
        )
        return RunningTurn(turn=self, running=running, streamed=streamed)


@define(eq=False, kw_only=True)
class RunningTurn:
    """A turn in progress: iterate `running`, in aclosing, and pass each output to `deltas`.

    streamed: outputs are deltas. Per choice: its parser, its filter of calls, the number of tokens
    so far, and the texts of its thoughts. called: choices with tool calls.
    """

    turn: ChatTurn
    running: Running
    streamed: bool
    parsers: list[MessageParser] = field(init=False)
    calls: list[_AllowedCalls] = field(init=False)
    generated: list[int] = field(init=False)
    thoughts: list[list[str]] = field(init=False)
    called: set[int] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        count = self.turn.params.n
        self.parsers = [self.turn.parser() for _ in range(count)]
        self.calls = [_AllowedCalls(self.turn.allowed) for _ in range(count)]
        self.generated = [0] * count
        self.thoughts = [[] for _ in range(count)]

    def deltas(self, output: RequestOutput) -> list[Delta]:
        """Parse an engine output of kind DELTA into the choices' deltas."""
        return [self._delta(choice) for choice in output.outputs]

    def _delta(self, choice: CompletionOutput) -> Delta:
        index, parser = choice.index, self.parsers[choice.index]
        self.generated[index] += len(choice.token_ids)
        hide_thoughts = not self.turn.reasoning
        thought = hide_thoughts and parser.reasoning
        events = parser.feed(choice.text, choice.token_ids)
        if choice.finish_reason is not None:
            events += parser.finish()
        self._note_calls(index, events, ended=choice.finish_reason is not None)
        events = [event for event in events if not _empty(event)]
        token_ids, logprobs = choice.token_ids, choice.logprobs
        if self.turn.parsers.reasoning is not None:
            shown_events = self._read_thoughts(index, events)
            if hide_thoughts and (thought or parser.reasoning or len(shown_events) < len(events)):
                last = self._count_shown_tokens(token_ids, shown_events)
                token_ids = token_ids[len(token_ids) - last :]
                logprobs = None if logprobs is None else logprobs[len(logprobs) - last :]
            events = shown_events if hide_thoughts else events
        return Delta(
            index=index,
            events=self.calls[index].of(events),
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            generated=self.generated[index],
            weight_versions=choice.weight_versions,
            routed_experts=chosen_experts(choice),
        )

    def _note_calls(self, index: int, events: Sequence[Event], *, ended: bool) -> None:
        """Count a choice that a tool parser read, once it has ended."""
        turn = self.turn
        if not (turn.parsers.tool and turn.tools and turn.tool_choice != "none"):
            return
        if any(isinstance(event, ToolStart) for event in events):
            self.called.add(index)
        if ended:
            called = index in self.called
            turn.generation.tool_calls.add(turn.api, streamed=self.streamed, called=called)

    def _read_thoughts(self, index: int, events: Sequence[Event]) -> list[Event]:
        """Record the thoughts; returns the other events."""
        others: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                self.thoughts[index].append(event.text)
            else:
                others.append(event)
        return others

    def _count_shown_tokens(self, token_ids: Sequence[int], events: Sequence[Event]) -> int:
        """Count a delta's last tokens that spell the text after a thought."""
        length = sum(len(event.text) for event in events if isinstance(event, Content))
        decode, count, decoded = self.turn.generation.tokenizer.decode, 0, 0
        while decoded < length and count < len(token_ids):
            count += 1
            decoded = len(decode(token_ids[len(token_ids) - count :], False))
        return count

    async def reasoning_tokens(self) -> int | None:
        """Count the tokens of all thoughts, by tokenizing their text again.

        None on a server without a reasoning parser.
        """
        if self.turn.parsers.reasoning is None:
            return None
        texts = ["".join(thoughts) for thoughts in self.thoughts]
        encode = self.turn.generation.tokenizer.encode

        def count() -> list[int]:
            return [len(encode(text, add_special_tokens=False)) if text else 0 for text in texts]

        short = sum(map(len, texts)) <= _SHORT
        counts = count() if short else await asyncio.to_thread(count)
        return sum(map(min, counts, self.generated))

    async def messages(self) -> tuple[RequestOutput, list[Message]]:
        """Run to the end; returns (the engine's last output, the choices as messages)."""
        deltas_by_choice: list[list[Delta]] = [[] for _ in self.parsers]
        outputs = [await self.running.last()] if not self.streamed else []
        if self.streamed:
            async with aclosing(self.running):
                outputs = [output async for output in self.running]
        for output in outputs:
            for delta in self.deltas(output):
                deltas_by_choice[delta.index].append(delta)
        return outputs[-1], [_message(deltas) for deltas in deltas_by_choice if deltas]


def _message(deltas: Sequence[Delta]) -> Message:
    """Assemble a complete choice from its deltas."""
    last, logprobs = deltas[-1], [delta.logprobs for delta in deltas if delta.logprobs is not None]
    routes = [delta.routed_experts for delta in deltas if delta.routed_experts is not None]
    return Message(
        index=last.index,
        parsed=assemble([event for delta in deltas for event in delta.events]),
        generated=last.generated,
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[position for some in logprobs for position in some] if logprobs else None,
        finish_reason=last.finish_reason or "stop",
        stop_reason=last.stop_reason,
        weight_versions=last.weight_versions,
        routed_experts=np.concatenate(routes) if routes else None,
    )


class _AllowedCalls:
    """Drops calls of tools that are not among `names`, and renumbers the others."""

    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names
        self._indices: dict[int, int] = {}

    def of(self, events: list[Event]) -> list[Event]:
        """The events that the client may see."""
        if self._names is None:
            return events
        allowed: list[Event] = []
        for event in events:
            if isinstance(event, Content | Reasoning):
                allowed.append(event)
                continue
            if isinstance(event, ToolStart) and event.name in self._names:
                self._indices[event.index] = len(self._indices)
            if event.index in self._indices:
                allowed.append(evolve(event, index=self._indices[event.index]))
        return allowed


def _empty(event: Event) -> bool:
    return isinstance(event, Content | Reasoning) and not event.text
