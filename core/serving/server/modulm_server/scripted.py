"""A scripted engine without a model, for tests of servers, routes and clients."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from attrs import define, field, frozen

from modulm.config import EngineConfig
from modulm.contracts.engine_info import EngineInfo
from modulm.contracts.executor import RowLogprobs
from modulm.contracts.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from modulm.contracts.requests import Finish, PromptLike, StepStats
from modulm.contracts.sampling import OutputKind, PoolingParams, SamplingParams
from modulm.contracts.tokenizer import Tokenizer
from modulm.engine.sampling.logits_processors import processor_classes
from modulm.errors import EngineDead, EngineError, NotFound, RequestError, UnsupportedError
from modulm.plugins import manager
from modulm_frontend.beam_search import BeamSearchParams
from modulm_frontend.output_processor import Choice
from modulm_frontend.prompt_embeds import check_embeds
from modulm_frontend.validation import check, check_pooling, check_prompt, truncated
from modulm_server.engine.adapters import Adapter
from modulm_server.engine.client import EngineClient, Tenant
from modulm_server.engine.metrics import Metrics

__all__ = ["Reply", "ScriptedEngine", "scripted_info"]


@frozen
class Reply:
    """The scripted reply to one request.

    text: the output, tokenized by the real tokenizer. tokens: ids to send instead. delay: seconds
    before each token. error_at: index of the token at which the request fails. die_at: index at
    which the engine dies. endless: repeat forever.
    """

    text: str = "Hello there."
    tokens: Sequence[int] | None = None
    delay: float = 0.0
    error_at: int | None = None
    error: Exception = field(factory=lambda: EngineError("scripted failure"))
    die_at: int | None = None
    endless: bool = False


def scripted_info(tokenizer: Tokenizer, **changes: Any) -> EngineInfo:
    """The info of a scripted engine: a model M with a context of 256 tokens."""
    facts: dict[str, Any] = {
        "config": EngineConfig(),
        "models": ("M",),
        "path": "",
        "architecture": "Scripted",
        "max_model_len": 256,
        "vocabulary": len(tokenizer),
        "hidden": 8,
        "dtype": "float32",
        "eos": tokenizer.stop_ids,
    }
    return EngineInfo(**{**facts, **changes})


@define(eq=False)
class _Running:
    request: str
    cut: asyncio.Event = field(factory=asyncio.Event)


class ScriptedEngine(EngineClient):
    """Answers each request with `reply(prompt text, params)`. Invalid requests fail as usual.

    seen: (prompt, params) of every accepted request; salts: its cache salt; used: its adapter;
    tenants: its tenant.
    aborted: requests whose reader disconnected. bad: adapter paths that fail to load, with the
    reason. functions: what calls into its one worker run, by name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reply: Callable[[str, SamplingParams], Reply] = lambda prompt, params: Reply(),
        info: EngineInfo | None = None,
    ) -> None:
        self.tokenizer: Tokenizer = tokenizer
        self.info = info or scripted_info(tokenizer)
        self.metrics = Metrics(self.info.models[0])
        self.reply = reply
        self.seen: list[tuple[Any, SamplingParams]] = []
        self.salts: list[str | None] = []
        self.aborted: list[str] = []
        self.resets = 0
        self.waiting = 0
        self._running: dict[str, _Running] = {}
        self._adapters: dict[str, Adapter] = {}
        self.bad: dict[str, str] = {}
        self.used: list[str | None] = []
        self.tenants: list[Tenant | None] = []
        self.functions: dict[str, Callable[..., Any]] = {}

    def die(self) -> None:
        """Kill the engine: every running request fails."""
        self.dead = EngineDead("scripted death")
        for running in self._running.values():
            running.cut.set()

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        return self._adapters

    def load_adapter(self, adapter: Adapter, *, replace: bool = False) -> Future[None]:
        answer: Future[None] = Future()
        if adapter.path in self.bad:
            message = f"adapter {adapter.name!r} cannot be loaded: {self.bad[adapter.path]}"
            answer.set_exception(RequestError(message, "lora_path"))
        elif adapter.name in self._adapters and not replace:
            message = f"adapter {adapter.name!r} is already loaded"
            answer.set_exception(RequestError(message, "lora_name"))
        else:
            self._adapters[adapter.name] = adapter
            answer.set_result(None)
        return answer

    def unload_adapter(self, name: str) -> Future[None]:
        answer: Future[None] = Future()
        if self._adapters.pop(name, None) is None:
            answer.set_exception(NotFound(f"adapter {name!r} is not loaded", "lora_name"))
        else:
            answer.set_result(None)
        return answer

    async def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._running[request_id].cut.set()

    async def drain(self, timeout: float | None = None) -> bool:
        latest = math.inf if timeout is None else time.monotonic() + timeout
        while self._running and time.monotonic() < latest:
            await asyncio.sleep(0.01)
        left = list(self._running.values())
        for running in left:
            running.cut.set()
        return not left

    def shutdown(self) -> None:
        """Nothing to stop."""

    async def reset_prefix_cache(self) -> bool:
        """Count the calls."""
        self.resets += 1
        return True

    def report_by(self, report: Callable[[], str]) -> None:
        """Do nothing."""

    async def reports(self) -> list[str]:
        """There are no other processes."""
        return []

    async def sleep(self, level: int = 1) -> None:
        raise UnsupportedError("a scripted engine cannot sleep")

    async def is_sleeping(self) -> bool:
        return False

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        raise UnsupportedError("a scripted engine cannot sleep")

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        function = self.functions.get(str(method))
        if function is None:
            raise NotFound(f"there is no worker function {method!r}", "method")
        return [function(*args, **kwargs or {})]

    @property
    def active(self) -> int:
        return len(self._running)

    @property
    def stats(self) -> StepStats:
        """Statistics of a fictitious step."""
        return StepStats(step=0, running=self.active, waiting=self.waiting, usage=0.0)

    async def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.check_health()
        if isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
            embeds: Any = prompt["prompt_embeds"]
            check_embeds(embeds, params)
        ids, text = self._ids(prompt)
        ids = truncated(ids, params.truncate_prompt_tokens, self.info.max_model_len)
        check_prompt(ids, vocabulary=self.info.vocabulary, max_model_len=self.info.max_model_len)
        params = check(
            params,
            vocabulary=self.info.vocabulary,
            max_model_len=self.info.max_model_len,
            prompt_len=len(ids),
            processors=processor_classes(None, manager.current()),
            config=self.info.config,
        )
        self.seen.append((prompt, params))
        self.salts.append(cache_salt)
        self.used.append(adapter)
        self.tenants.append(tenant)
        running = self._running[request_id] = _Running(request_id)
        whole = False
        try:
            prompt_text = await self._text(text, ids)
            play = _Play(self, list(ids), text, params, self.reply(prompt_text, params), running)
            async for output in play.outputs():
                whole = output.finished
                yield output
        finally:
            if not whole:
                self.aborted.append(request_id)
            del self._running[request_id]

    async def beam_search(
        self,
        prompt: PromptLike,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate as many equal outputs as there are beams."""
        text_params = params.text_params()
        more: Any = {"cache_salt": cache_salt, "adapter": adapter, "tenant": tenant}
        async for output in self.generate(prompt, text_params, request_id, **more):
            yield output

    async def encode(
        self,
        prompt: PromptLike,
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: Tenant | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Return a vector that depends only on the token ids."""
        await self.check_health()
        ids, text = self._ids(prompt)
        check_prompt(ids, vocabulary=self.info.vocabulary, max_model_len=self.info.max_model_len)
        check_pooling(
            params,
            tasks=self.info.tasks,
            hidden=self.info.hidden,
            max_model_len=self.info.max_model_len,
        )
        self.salts.append(cache_salt)
        self.used.append(adapter)
        self.tenants.append(tenant)
        await self._pause(request_id, await self._text(text, ids))
        vector = np.zeros(self.info.hidden, dtype=np.float32)
        vector += np.bincount(np.array(ids) % len(vector), minlength=len(vector))
        vector = vector[: params.dimensions] / np.linalg.norm(vector[: params.dimensions])
        yield PoolingRequestOutput(request_id, PoolingOutput(vector), list(ids))

    async def _pause(self, request_id: str, text: str) -> None:
        """Wait for the scripted delay before a vector."""
        delay = self.reply(text, SamplingParams()).delay
        if not delay:
            return
        self._running[request_id] = _Running(request_id)
        try:
            await asyncio.sleep(delay)
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        finally:
            del self._running[request_id]

    async def _text(self, text: str | None, ids: Sequence[int]) -> str:
        """The text of a prompt, from its token ids if need be, off the loop."""
        if text is not None:
            return text
        return await asyncio.to_thread(lambda: self.tokenizer.decode(list(ids), False))

    def _ids(self, prompt: PromptLike) -> tuple[Sequence[int], str | None]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt), prompt
        table: Any = prompt if isinstance(prompt, Mapping) else {"prompt_token_ids": prompt}
        return table["prompt_token_ids"], table.get("prompt")


@define(eq=False)
class _Play:
    """A running scripted reply."""

    engine: ScriptedEngine
    ids: list[int]
    text: str | None
    params: SamplingParams
    script: Reply
    running: _Running

    def _tokens(self) -> list[int]:
        """The script's tokens; of those that are not allowed, the first allowed one instead."""
        tokens = self.script.tokens
        if tokens is None:
            tokens = self.engine.tokenizer.encode(self.script.text, add_special_tokens=False)
        allowed = self.params.allowed_token_ids
        return [t if not allowed or t in allowed else allowed[0] for t in tokens]

    async def outputs(self) -> AsyncGenerator[RequestOutput, None]:
        params, tokens = self.params, self._tokens()
        tokenizer = self.engine.tokenizer
        choices = [Choice(i, self.ids, params, tokenizer) for i in range(params.n)]
        limit = params.max_tokens or 16
        length = limit if self.script.endless else min(limit, len(tokens) + 1)
        for index in range(length):
            await self._wait(index)
            if self.running.cut.is_set():
                await self.engine.check_health()
                for choice in choices:
                    choice.finish(Finish(self.running.request, "abort"))
            over = index == len(tokens) and not self.script.endless
            token = tokenizer.stop_ids[0] if over else tokens[index % len(tokens)]
            reason = "stop" if over else "length" if index + 1 == limit else None
            finish = Finish(self.running.request, reason) if reason else None  # type: ignore[arg-type]
            for choice in choices:
                if choice.reason is None:
                    choice.add(token, self._logprobs(token), finish)
            finished = all(choice.reason is not None for choice in choices)
            if params.output_kind is not OutputKind.FINAL_ONLY or finished:
                yield self._output(choices, finished)
            if finished:
                return

    async def _wait(self, index: int) -> None:
        if index == self.script.die_at:
            self.engine.die()
            await self.engine.check_health()
        if index == self.script.error_at:
            raise self.script.error
        if self.script.delay:
            try:
                await asyncio.wait_for(self.running.cut.wait(), self.script.delay)
            except TimeoutError:
                return
        else:
            await asyncio.sleep(0)

    def _logprobs(self, token: int) -> RowLogprobs | None:
        count = self.params.logprobs
        if count is None:
            return None
        others = (token + np.arange(max(count, 0))) % self.engine.info.vocabulary
        values = [-0.5, *(-0.5 * (1.0 + np.arange(len(others))))]
        return RowLogprobs(np.array([token, *others]), np.array(values), 1)

    def _output(self, choices: list[Choice], finished: bool) -> RequestOutput:
        delta = self.params.output_kind is OutputKind.DELTA
        outputs = [choice.delta() if delta else choice.output() for choice in choices]
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            from modulm_frontend.output_processor import position

            entries = [RowLogprobs(np.array([i]), np.array([-1.0]), 1) for i in self.ids[1:]]
            prompt_logprobs = [None, *(position(e, self.engine.tokenizer) for e in entries)]
        return RequestOutput(
            request_id=self.running.request,
            prompt=self.text,
            prompt_token_ids=self.ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[output for output in outputs if output is not None],
            finished=finished,
            num_cached_tokens=0,
            kv_transfer_params=self._transferred(),
        )

    def _transferred(self) -> dict[str, Any] | None:
        """What an engine that computes prompts for others says about one."""
        asked: Any = (self.params.extra_args or {}).get("kv_transfer_params", {})
        return {"do_remote_prefill": True} if asked.get("do_remote_decode") else None
