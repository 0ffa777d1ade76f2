"""One turn of a conversation: what the chat APIs share between their schema and the engine.

A turn is a prompt, sampling parameters and the parsers that read the model's text back. Its
deltas say what became certain, for every choice, whatever the API then calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from modulm.contracts.parser import Content, ParseContext, Reasoning, ToolStart
from modulm.contracts.sampling import OutputKind
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

#: Characters of the prompt's end that a parser gets to see.
_TAIL = 512
#: Characters of a thought up to which its tokens are counted at once, not in a thread.
_SHORT = 4_096


@frozen
class Parsers:
    """The parsers of the server by name; with a tool parser the model may decide to call tools."""

    tool: str | None = None
    reasoning: str | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> Parsers:
        """Those of a configuration."""
        return cls(config.tool_calls.tool_call_parser, config.structured_outputs.reasoning_parser)


@frozen(kw_only=True)
class Delta:
    """What is new of one choice. `generated` counts the tokens of the whole choice so far, those
    of thoughts that are not shown among them; token_ids and logprobs are of what is shown.
    """

    index: int
    events: Sequence[Event]
    token_ids: Sequence[int]
    logprobs: Sequence[Position] | None
    finish_reason: str | None
    stop_reason: int | str | None
    generated: int


@frozen(kw_only=True)
class Message:
    """A whole choice. `generated` counts all its tokens; token_ids, logprobs: of what is shown."""

    index: int
    parsed: ParsedMessage
    generated: int
    token_ids: Sequence[int]
    logprobs: Sequence[Position] | None
    finish_reason: str
    stop_reason: int | str | None


@frozen(kw_only=True)
class ChatTurn:
    """A turn that is ready to run.

    tools: in OpenAI's form. tool_choice: as in OpenAI's API. allowed: names of the tools that may
    be called, None for all; calls of others are no part of the answer. held: a grammar writes the
    calls, in the model's own format. reasoning: whether thoughts are shown; tokens: whether ids or
    logprobs are. fields: what the API calls a field of the engine's, where it has another name for
    it; errors blame that. adapter: of `GenerationService.find_model`.
    """

    generation: GenerationService
    prompt: Prompt
    params: SamplingParams | BeamSearchParams
    parsers: Parsers
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "none"
    allowed: frozenset[str] | None = None
    held: bool = False
    reasoning: bool = True
    tokens: bool = False
    template_kwargs: Mapping[str, Any] = field(factory=dict)
    fields: Mapping[str, str] = field(factory=dict)
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None

    def check(self) -> None:
        """Raise ApiError(400) if the model may call tools and nothing here could read the calls."""
        if self.tools and self.tool_choice == "auto" and not self.parsers.tool:
            raise ApiError(
                400,
                'tool_choice "auto" needs a tool parser, and this server has none for its model: '
                "start it with --tool-call-parser and a name of `modulm plugins list tool_parsers`",
                param="tool_choice",
            )

    def parser(self) -> MessageParser:
        """A fresh parser for one choice."""
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
            held=self.held,
        )
        return message_parser(
            context,
            self.parsers.tool if reads else None,
            self.parsers.reasoning,
        )

    def tuned(self) -> SamplingParams | BeamSearchParams:
        """The parameters, with special tokens kept where a parser reads them."""
        params = self.params
        if params.skip_special_tokens and self.parser().special_tokens:
            params = params.with_(skip_special_tokens=False)
        if self.reasoning or not self.tokens or isinstance(params, BeamSearchParams):
            return params
        # In pieces it can be seen which tokens are thoughts.
        return params.with_(output_kind=OutputKind.DELTA)

    async def start(self) -> RunningTurn:
        """Hand the turn to the engine. Raises what the engine has against it."""
        params = self.tuned()
        pieces = False
        if not isinstance(params, BeamSearchParams):
            pieces = params.output_kind is OutputKind.DELTA
            if pieces and (params.best_of or 0) > params.n:
                raise bad_field(
                    "include_reasoning",
                    "include_reasoning: the tokens of the best of several choices are shown with "
                    "their thoughts, or not at all",
                )
        running = await self.generation.generate(
            self.prompt,
            params,
            priority=self.priority,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            fields=self.fields,
        )
        return RunningTurn(turn=self, running=running, pieces=pieces)


@define(eq=False, kw_only=True)
class RunningTurn:
    """A turn in progress: iterate `running`, in aclosing, and give each output to `deltas`.

    pieces: the engine tells the answer as it grows. parsers, calls, generated, thoughts: of each
    choice; how many tokens it has so far, and the texts of its thoughts.
    """

    turn: ChatTurn
    running: Running
    pieces: bool
    parsers: list[MessageParser] = field(init=False)
    calls: list[_AllowedCalls] = field(init=False)
    generated: list[int] = field(init=False)
    thoughts: list[list[str]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        count = self.turn.params.n
        self.parsers = [self.turn.parser() for _ in range(count)]
        self.calls = [_AllowedCalls(self.turn.allowed) for _ in range(count)]
        self.generated = [0] * count
        self.thoughts = [[] for _ in range(count)]

    def deltas(self, output: RequestOutput) -> list[Delta]:
        """What an output of the engine (of kind DELTA) means for the choices."""
        return [self._delta(choice) for choice in output.outputs]

    def _delta(self, choice: CompletionOutput) -> Delta:
        index, parser = choice.index, self.parsers[choice.index]
        self.generated[index] += len(choice.token_ids)
        quiet = not self.turn.reasoning
        thought = quiet and parser.reasoning
        events = parser.feed(choice.text, choice.token_ids)
        if choice.finish_reason is not None:
            events += parser.finish()
        events = [event for event in events if not _empty(event)]
        token_ids, logprobs = choice.token_ids, choice.logprobs
        if self.turn.parsers.reasoning is not None:
            kept = self._read_thoughts(index, events)
            if quiet and (thought or parser.reasoning or len(kept) < len(events)):
                last = self._last_shown(token_ids, kept)
                token_ids = token_ids[len(token_ids) - last :]
                logprobs = None if logprobs is None else logprobs[len(logprobs) - last :]
            events = kept if quiet else events
        return Delta(
            index=index,
            events=self.calls[index].of(events),
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            generated=self.generated[index],
        )

    def _read_thoughts(self, index: int, events: Sequence[Event]) -> list[Event]:
        """Note what was thought; the events without that."""
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                self.thoughts[index].append(event.text)
            else:
                kept.append(event)
        return kept

    def _last_shown(self, token_ids: Sequence[int], kept: Sequence[Event]) -> int:
        """How many of a delta's last tokens spell the text that stands behind a thought."""
        length = sum(len(event.text) for event in kept if isinstance(event, Content))
        decode, count, found = self.turn.generation.tokenizer.decode, 0, 0
        while found < length and count < len(token_ids):
            count += 1
            found = len(decode(token_ids[len(token_ids) - count :], False))
        return count

    async def reasoning_tokens(self) -> int | None:
        """How many tokens the choices have thought, tokenized again: parsers tell text, not tokens.

        None on a server that reads no thoughts.
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
        """The engine's last output, and the choices as messages."""
        told: list[list[Delta]] = [[] for _ in self.parsers]
        outputs = [await self.running.last()] if not self.pieces else []
        if self.pieces:
            async with aclosing(self.running):
                outputs = [output async for output in self.running]
        for output in outputs:
            for delta in self.deltas(output):
                told[delta.index].append(delta)
        return outputs[-1], [_message(deltas) for deltas in told if deltas]


def _message(deltas: Sequence[Delta]) -> Message:
    """A choice of which all is told."""
    last, logprobs = deltas[-1], [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return Message(
        index=last.index,
        parsed=assemble([event for delta in deltas for event in delta.events]),
        generated=last.generated,
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[position for some in logprobs for position in some] if logprobs else None,
        finish_reason=last.finish_reason or "stop",
        stop_reason=last.stop_reason,
    )


class _AllowedCalls:
    """Leaves out the calls of tools that are not among `names`; the others are counted anew."""

    def __init__(self, names: frozenset[str] | None) -> None:
        self._names = names
        self._places: dict[int, int] = {}

    def of(self, events: list[Event]) -> list[Event]:
        """The events that the client may see."""
        if self._names is None:
            return events
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Content | Reasoning):
                kept.append(event)
                continue
            if isinstance(event, ToolStart) and event.name in self._names:
                self._places[event.index] = len(self._places)
            if event.index in self._places:
                kept.append(evolve(event, index=self._places[event.index]))
        return kept


def _empty(event: Event) -> bool:
    return isinstance(event, Content | Reasoning) and not event.text
