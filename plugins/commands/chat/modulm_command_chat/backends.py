"""Backends of the chat: a server, or an engine in this process. Both stream text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from queue import Queue
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Protocol
from uuid import uuid4

from attrs import frozen

from modulm_command_chat.client import Client

if TYPE_CHECKING:
    from modulm.config.sources import Draft
    from modulm_server.engine.async_llm import AsyncLLM

__all__ = ["Backend", "LocalEngine", "Piece", "RemoteServer", "SamplingOptions", "Stats"]


@frozen
class Piece:
    """Some text of an answer. A `tool` piece is a tool call."""

    kind: Literal["text", "reasoning", "tool"]
    text: str


@frozen
class Stats:
    """Statistics of one answer: seconds to the first token, total seconds, tokens."""

    first: float
    total: float
    tokens: int

    def __str__(self) -> str:
        rate = self.tokens / self.total if self.total > 0 else 0.0
        return (
            f"{self.tokens} tokens in {self.total:.2f} s ({rate:.1f} tokens/s), "
            f"first after {self.first * 1000:.0f} ms"
        )


@frozen
class SamplingOptions:
    """Sampling options of the user. None means the model's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """The options that are set, by their names in the API and in SamplingParams."""
        values = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        return {name: value for name, value in values.items() if value is not None}


class Backend(Protocol):
    """A model to chat with. `stats`: of the last answer."""

    model: str
    stats: Stats | None

    def chat(
        self, messages: Sequence[Mapping[str, Any]], options: SamplingOptions
    ) -> Iterator[Piece]:
        """Stream the answer to a conversation. Closing the iterator stops it."""

    def complete(self, prompt: str, options: SamplingOptions) -> Iterator[Piece]:
        """Stream the continuation of `prompt`."""

    def close(self) -> None:
        """Release the backend."""


class RemoteServer:
    """A model behind OpenAI's API."""

    def __init__(self, url: str, key: str | None, model: str | None) -> None:
        self._client = Client(url, key)
        self.model = model or self._client.first_model()
        self.stats: Stats | None = None

    def chat(
        self, messages: Sequence[Mapping[str, Any]], options: SamplingOptions
    ) -> Iterator[Piece]:
        body = {"model": self.model, "messages": list(messages), **options.as_dict()}
        yield from self._timed("/chat/completions", body)

    def complete(self, prompt: str, options: SamplingOptions) -> Iterator[Piece]:
        yield from self._timed(
            "/completions", {"model": self.model, "prompt": prompt, **options.as_dict()}
        )

    def close(self) -> None:
        self._client.close()

    def _timed(self, path: str, body: dict[str, Any]) -> Iterator[Piece]:
        start = perf_counter()
        first, chunks, tokens = 0.0, 0, 0
        for chunk in self._client.stream(path, body):
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            for choice in chunk.get("choices", []):
                for piece in _pieces(choice):
                    first = first or perf_counter() - start
                    chunks += 1
                    yield piece
        self.stats = Stats(first, perf_counter() - start, tokens or chunks)


def _pieces(choice: Mapping[str, Any]) -> Iterator[Piece]:
    delta = choice.get("delta", {})
    reasoning = delta.get("reasoning") or delta.get("reasoning_content")
    if reasoning:
        yield Piece("reasoning", reasoning)
    text = delta.get("content") or choice.get("text")
    if text:
        yield Piece("text", text)
    for call in delta.get("tool_calls") or ():
        function = call.get("function", {})
        name = function.get("name")
        yield Piece("tool", (f"{name} " if name else "") + (function.get("arguments") or ""))


class LocalEngine:
    """A model in this process: the engine runs on an event loop in a separate thread."""

    def __init__(self, draft: Draft) -> None:
        from modulm.plugins import current
        from modulm_parsing.choice import with_declared_parsers

        # A thread, since a process would start more slowly.
        config = draft.config.with_(disable_frontend_multiprocessing=True)
        self._config = with_declared_parsers(config, current())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.model = draft.config.model.model
        self.stats: Stats | None = None
        self._engine = self._start()

    def _start(self) -> AsyncLLM:
        from modulm_server.engine.async_llm import AsyncLLM

        return AsyncLLM.from_config(self._config)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], options: SamplingOptions
    ) -> Iterator[Piece]:
        from modulm_chat.conversation import encode_chat

        ids, prompt = encode_chat(messages, tokenizer=self._engine.get_tokenizer())
        yield from self._parsed({"prompt_token_ids": ids}, prompt, options)

    def complete(self, prompt: str, options: SamplingOptions) -> Iterator[Piece]:
        for text in self._streamed(prompt, options):
            yield Piece("text", text)

    def close(self) -> None:
        self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _parsed(self, prompt: Any, tail: str, options: SamplingOptions) -> Iterator[Piece]:
        """Stream the answer through the reasoning parser, if there is one."""
        from modulm.contracts.parser import Content, ParseContext, Reasoning
        from modulm_parsing import message_parser

        parser = message_parser(
            ParseContext(prompt_tail=tail[-512:], tokenizer=self._engine.tokenizer),
            None,
            self._config.structured_outputs.reasoning_parser,
        )
        for text in self._streamed(prompt, options):
            for event in parser.feed(text):
                if isinstance(event, Reasoning):
                    yield Piece("reasoning", event.text)
                elif isinstance(event, Content):
                    yield Piece("text", event.text)
        for event in parser.finish():
            if isinstance(event, Content | Reasoning):
                yield Piece("text" if isinstance(event, Content) else "reasoning", event.text)

    def _streamed(self, prompt: Any, options: SamplingOptions) -> Iterator[str]:
        """Stream new text of the engine. Leaving early aborts the request."""
        queue: Queue[Any] = Queue()
        job = asyncio.run_coroutine_threadsafe(self._feed(prompt, options, queue), self._loop)
        start = perf_counter()
        first, tokens = 0.0, 0
        try:
            while (item := queue.get()) is not None:
                text, new = item
                first = first or perf_counter() - start
                tokens += new
                if text:
                    yield text
        finally:
            job.cancel()
            self.stats = Stats(first, perf_counter() - start, tokens)
        try:
            job.result()
        except CancelledError:
            return

    async def _feed(self, prompt: Any, options: SamplingOptions, queue: Queue[Any]) -> None:
        from modulm.contracts.sampling import OutputKind

        defaults = {"max_tokens": None, **self._engine.info.defaults}
        values = {**defaults, **options.as_dict(), "output_kind": OutputKind.DELTA}
        params = self._engine.info.default_params().with_(**values)
        try:
            async for output in self._engine.generate(prompt, params, uuid4().hex):
                new = output.outputs[0]
                queue.put((new.text, len(new.token_ids)))
        finally:
            queue.put(None)
