"""vLLM's AsyncLLMEngine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from modulm.contracts.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from modulm_server.engine.adapters import Adapter
from modulm_server.engine.async_llm import AsyncLLM
from modulm_vllm.engine import ModelFacts
from modulm_vllm.failures import EngineDeadError, as_vllm, refuse
from modulm_vllm.outputs import with_vllm_names
from modulm_vllm.params import LoRARequest, native
from modulm_vllm.tokenizers import that_can_be_awaited

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["AsyncLLMEngine", "UsageContext"]

#: Seconds between two looks whether requests run.
_LOOK = 0.05


class UsageContext(StrEnum):
    """vLLM's usage contexts, which have no effect."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class AsyncLLMEngine:
    """vLLM's asynchronous engine, on top of `modulm.AsyncLLM`. Use it from one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        with as_vllm():
            self._engine = AsyncLLM.from_config(config)
        self._loading = asyncio.Lock()
        self._adapters: dict[str, LoRARequest] = {}

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> AsyncLLMEngine:
        """Create an engine from arguments."""
        return cls(engine_args.create_engine_config())

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig, *_: Any, **__: Any) -> AsyncLLMEngine:
        """Create an engine from `AsyncEngineArgs.create_engine_config()`."""
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
        """Stream the outputs of a request. Leaving early aborts it."""
        refuse(**more)
        adapter = await self._adapter(lora_request)
        with as_vllm():
            outputs = self._engine.generate(
                prompt, native(sampling_params), request_id, priority=priority, adapter=adapter
            )
            async with aclosing(outputs):
                async for output in outputs:
                    yield with_vllm_names(output)

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
        """Pool a prompt; yields one output with a tensor as `outputs.data`."""
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
        """Abort requests. Their readers get a last output."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            await self._engine.abort(name)

    # Adapters are loaded when a request uses them, as in vLLM.

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
            adapter = Adapter(lora.lora_name, lora.lora_path)
            await asyncio.wrap_future(self._engine.load_adapter(adapter, replace=replace))
        self._adapters[lora.lora_name] = lora

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        await self._adapter(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Unload an adapter; returns whether it was loaded."""
        names = [n for n, lora in self._adapters.items() if lora.lora_int_id == lora_id]
        for name in names:
            await asyncio.wrap_future(self._engine.unload_adapter(name))
            del self._adapters[name]
        return bool(names)

    async def list_loras(self) -> set[int]:
        """The ids of the loaded adapters."""
        return {lora.lora_int_id for lora in self._adapters.values()}

    # Facts about the engine.

    def get_tokenizer(self, *_: Any) -> Any:
        """The transformers tokenizer. It can be awaited, as in older versions of vLLM."""
        with as_vllm():
            return that_can_be_awaited(self._engine.get_tokenizer().backend)

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.get_tokenizer()

    @property
    def model_config(self) -> ModelFacts:
        """Facts about the model."""
        return ModelFacts.of(self._engine.info)

    async def get_model_config(self) -> ModelFacts:
        """Facts about the model."""
        return self.model_config

    @property
    def is_running(self) -> bool:
        """Whether the engine is alive."""
        return self._engine.dead is None

    @property
    def is_stopped(self) -> bool:
        """Whether the engine is dead."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""
        return self._engine.dead is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """The error that ended the engine."""
        return EngineDeadError(str(self._engine.dead or "the engine is alive"))

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is dead."""
        with as_vllm():
            await self._engine.check_health()

    async def is_tracing_enabled(self) -> bool:
        """Always false: only the server sends traces."""
        return False

    async def do_log_stats(self) -> None:
        """Do nothing: statistics are under /metrics."""

    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache."""
        return await self._engine.reset_prefix_cache()

    async def reset_mm_cache(self) -> None:
        """Clear the outputs of encoders, and with them the prefix cache."""
        await self._engine.reset_prefix_cache()

    async def reset_encoder_cache(self) -> None:
        """Clear the outputs of encoders, and with them the prefix cache."""
        await self._engine.reset_prefix_cache()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model does: generate, embed, classify ..."""
        return tuple(self._engine.info.tasks)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until no request runs. Raises TimeoutError after drain_timeout seconds."""
        try:
            async with asyncio.timeout(drain_timeout):
                while self._engine.active:
                    await asyncio.sleep(_LOOK)
        except TimeoutError as error:
            raise TimeoutError(f"requests still run after {drain_timeout} seconds") from error

    async def start_profile(self) -> None:
        """Start profiling the engine's steps (profiler_config)."""
        with as_vllm():
            await self._engine.start_profile()

    async def stop_profile(self) -> None:
        """Stop profiling and write the trace."""
        with as_vllm():
            await self._engine.stop_profile()

    async def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache, and at level 2 that of the weights too."""
        with as_vllm():
            await self._engine.sleep(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocate memory again; `["weights"]` only that of the weights."""
        with as_vllm():
            await self._engine.wake_up(tags)

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function in every worker; answers by rank."""
        with as_vllm():
            return await self._engine.collective_rpc(method, timeout, args, kwargs)

    async def apply_model(self, func: Any) -> list[Any]:
        """Call a function with the model of every worker; answers by rank."""
        with as_vllm():
            return await self._engine.apply_model(func)

    # For trainers.

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Hold new requests until `resume_generation`. mode: what happens to running ones."""
        with as_vllm():
            await self._engine.pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Resume requests."""
        with as_vllm():
            await self._engine.resume_generation()

    async def is_paused(self) -> bool:
        """Whether generation is paused."""
        return await self._engine.is_paused()

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Connect the workers to the trainer."""
        with as_vllm():
            await self._engine.init_weight_transfer_engine(request)

    async def update_weight_version(self, weight_version: int) -> None:
        """Set the version of the weights, for example to the trainer's step."""
        with as_vllm():
            await self._engine.update_weight_version(weight_version)

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Begin a weight update."""
        with as_vllm():
            await self._engine.start_weight_update(is_checkpoint_format)

    async def update_weights(self, request: Any) -> None:
        """Receive tensors of an update."""
        with as_vllm():
            await self._engine.update_weights(request)

    async def finish_weight_update(self) -> None:
        """Switch to the new weights."""
        with as_vllm():
            await self._engine.finish_weight_update()

    async def is_sleeping(self) -> bool:
        """Whether the engine is asleep."""
        return await self._engine.is_sleeping()

    def shutdown(self) -> None:
        """Stop the engine and abort its requests."""
        self._engine.shutdown()

    shutdown_background_loop = shutdown
