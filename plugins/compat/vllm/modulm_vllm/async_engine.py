"""AsyncLLMEngine: many callers on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from modulm.contracts.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from modulm_server.engine.adapters import Adapter
from modulm_server.engine.async_llm import AsyncLLM
from modulm_vllm.engine import ModelFacts
from modulm_vllm.failures import EngineDeadError, as_vllm, refuse
from modulm_vllm.params import LoRARequest, native
from modulm_vllm.tokenizers import that_can_be_awaited

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["AsyncLLMEngine", "UsageContext"]


class UsageContext(StrEnum):
    """What vLLM's engine is told of its use; it changes nothing here."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class AsyncLLMEngine:
    """vLLM's engine for servers, answered by `modulm.AsyncLLM`. Use it from one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        with as_vllm():
            self._engine = AsyncLLM.from_config(config)
        self._loading = asyncio.Lock()
        self._adapters: dict[str, LoRARequest] = {}

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> AsyncLLMEngine:
        """The engine that arguments describe."""
        return cls(engine_args.create_engine_config())

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig, *_: Any, **__: Any) -> AsyncLLMEngine:
        """The engine of what `AsyncEngineArgs.create_engine_config` gives."""
        return cls(vllm_config)

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        **more: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come; leaving early aborts the request."""
        refuse(**more)
        adapter = await self._adapter(lora_request)
        with as_vllm():
            outputs = self._engine.generate(
                prompt, native(sampling_params), request_id, priority=priority, adapter=adapter
            )
            async with aclosing(outputs):
                async for output in outputs:
                    yield output

    async def encode(
        self,
        prompt: Any,
        pooling_params: Any,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        **more: Any,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """One output, with a tensor as `outputs.data`."""
        refuse(**more)
        adapter = await self._adapter(lora_request)
        with as_vllm():
            outputs = self._engine.encode(
                prompt, native(pooling_params), request_id, priority=priority, adapter=adapter
            )
            async with aclosing(outputs):
                async for output in outputs:
                    output.outputs = PoolingOutput(torch.from_numpy(output.outputs.data.copy()))
                    yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; whoever reads them gets their last output."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            await self._engine.abort(name)

    # Adapters: vLLM reads one when a request names it.

    async def _adapter(self, lora: LoRARequest | None) -> str | None:
        if lora is None:
            return None
        async with self._loading:
            known = self._adapters.get(lora.lora_name)
            if known != lora:
                await self._load(lora, replace=known is not None)
        return lora.lora_name

    async def _load(self, lora: LoRARequest, replace: bool) -> None:
        with as_vllm():
            asked = Adapter(lora.lora_name, lora.lora_path)
            await asyncio.wrap_future(self._engine.load_adapter(asked, replace=replace))
        self._adapters[lora.lora_name] = lora

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter before a request names it."""
        await self._adapter(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; whether it was there."""
        named = [n for n, lora in self._adapters.items() if lora.lora_int_id == lora_id]
        for name in named:
            await asyncio.wrap_future(self._engine.unload_adapter(name))
            del self._adapters[name]
        return bool(named)

    async def list_loras(self) -> set[int]:
        """The numbers of the adapters that were read."""
        return {lora.lora_int_id for lora in self._adapters.values()}

    # What is known of it.

    def get_tokenizer(self, *_: Any) -> Any:
        """The tokenizer, as transformers has it. Older scripts await it, newer ones do not."""
        with as_vllm():
            return that_can_be_awaited(self._engine.get_tokenizer().backend)

    @property
    def tokenizer(self) -> Any:
        """The same."""
        return self.get_tokenizer()

    @property
    def model_config(self) -> ModelFacts:
        """What is known of the model."""
        return ModelFacts.of(self._engine.info)

    async def get_model_config(self) -> ModelFacts:
        """The same."""
        return self.model_config

    @property
    def is_running(self) -> bool:
        """Whether the engine lives."""
        return self._engine.dead is None

    @property
    def is_stopped(self) -> bool:
        """Whether it does not."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether it cannot go on."""
        return self._engine.dead is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """Why."""
        return EngineDeadError(str(self._engine.dead or "the engine is alive"))

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot go on."""
        with as_vllm():
            await self._engine.check_health()

    async def is_tracing_enabled(self) -> bool:
        """Whether traces are sent of the engine's requests: those of the server are."""
        return False

    async def do_log_stats(self) -> None:
        """vLLM logs its statistics when told to; here they are under /metrics."""

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes."""
        return await self._engine.reset_prefix_cache()

    async def start_profile(self) -> None:
        """Record the engine's steps from now on (profiler_config)."""
        with as_vllm():
            await self._engine.start_profile()

    async def stop_profile(self) -> None:
        """Write what was recorded."""
        with as_vllm():
            await self._engine.stop_profile()

    async def sleep(self, level: int = 1) -> None:
        """Give back memory: of the caches, with level 2 of the weights as well."""
        with as_vllm():
            await self._engine.sleep(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory again, all of it."""
        refuse(tags=tags)
        await self._engine.wake_up()

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        return await self._engine.is_sleeping()

    def shutdown(self) -> None:
        """Stop the engine; requests that are left end."""
        self._engine.shutdown()

    shutdown_background_loop = shutdown
