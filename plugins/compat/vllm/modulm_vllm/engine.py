"""vLLM's LLMEngine, whose caller runs its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from attrs import frozen

from modulm.engine.core.engine_core import EngineCore
from modulm.engine.sampling.logits_processors import processor_classes
from modulm.plugins import manager
from modulm_frontend.defaults import sampling_defaults
from modulm_frontend.input_processor import InputProcessor
from modulm_frontend.interrupts import Interrupts
from modulm_frontend.lora import OfflineAdapters
from modulm_frontend.output_processor import OutputProcessor, RequestState
from modulm_tokenizers.tokenizer import open_tokenizer
from modulm_vllm.failures import as_vllm, refuse
from modulm_vllm.outputs import with_vllm_names
from modulm_vllm.params import native, native_adapter

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.engine_info import EngineInfo
    from modulm.contracts.requests import StepEvents
    from modulm.contracts.tokenizer import Tokenizer
    from modulm.errors import EngineDead

__all__ = ["EngineFacts", "LLMEngine", "ModelFacts"]


@frozen
class ModelFacts:
    """The fields of vLLM's `model_config` that scripts use. served_model_name: the first one."""

    model: str
    tokenizer: str
    max_model_len: int
    dtype: Any
    seed: int
    served_model_name: str
    architecture: str
    trust_remote_code: bool
    vocabulary: int

    @classmethod
    def of(cls, info: EngineInfo) -> Self:
        """The facts of an engine."""
        import torch

        model = info.config.model
        return cls(
            model=model.model,
            tokenizer=model.tokenizer or model.model,
            max_model_len=info.max_model_len,
            dtype=getattr(torch, str(info.dtype).removeprefix("torch."), info.dtype),
            seed=model.seed,
            served_model_name=info.models[0],
            architecture=info.architecture,
            trust_remote_code=model.trust_remote_code,
            vocabulary=info.vocabulary,
        )

    def get_vocab_size(self) -> int:
        """The width of the logits."""
        return self.vocabulary


@frozen
class EngineFacts:
    """The members of vLLM's `LLM.llm_engine` that scripts use. model_executor: leads to the model
    at `driver_worker.model_runner.model`; only of an `LLM`.
    """

    info: EngineInfo
    _tokenizer: Tokenizer | None
    model_executor: Any = None

    @property
    def model_config(self) -> ModelFacts:
        return ModelFacts.of(self.info)

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer; None without one."""
        return None if self._tokenizer is None else self._tokenizer.backend

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer; None without one."""
        return self.tokenizer

    def get_model_config(self) -> ModelFacts:
        """Facts about the model."""
        return self.model_config


class LLMEngine:
    """An engine in the caller's thread; the caller runs its steps."""

    def __init__(self, config: EngineConfig) -> None:
        plugins = manager.current()
        with as_vllm():
            self._core = EngineCore(config, plugins, self, "offline", sampling_defaults)
        self.info = self._core.info
        self._tokenizer = open_tokenizer(self.info.config, self.info.path)
        processors = processor_classes(config.model.logits_processors, plugins)
        self._inputs = InputProcessor(self.info, self._tokenizer, plugins, processors)
        listeners = plugins.gather("modulm_request_listeners", config=config)
        self._outputs = OutputProcessor(listeners=listeners)
        self._adapters = OfflineAdapters(self._core)
        self._requests: dict[str, RequestState] = {}
        self._news: list[RequestState] = []
        self._interrupts = Interrupts(self._interrupted_within_step)

    @classmethod
    def from_engine_args(cls, engine_args: Any, *_: Any, **__: Any) -> LLMEngine:
        """Create an engine from arguments."""
        return cls(engine_args.create_engine_config())

    # Called by the engine.

    def events(self, events: StepEvents) -> None:
        """Process the events of a finished step."""
        news, stopped = self._outputs.process(events)
        for identity in stopped:
            self._core.loop.abort(identity)
        self._news += news

    def died(self, error: EngineDead) -> None:
        """Fail all requests, since the engine has stopped."""
        self._news += self._outputs.fail_all(error)

    def _interrupted_within_step(self) -> None:
        self._core.loop.fail(EngineDead("interrupted within a step: create a new engine"))

    # The public interface.

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
    ) -> None:
        """Add a request, whose outputs `step` returns. Raises ValueError for invalid arguments."""
        refuse(tokenization_kwargs=tokenization_kwargs)
        lora = native_adapter(lora_request)
        with as_vllm():
            pending = self._inputs.process(
                prompt,
                native(params),
                request_id,
                priority=priority,
                adapter=None if lora is None else lora.lora_name,
            )
            pending = self._adapters.apply(pending, lora)
            self._outputs.add(pending.state)
            self._core.submit(*pending.requests)
        self._requests[request_id] = pending.state

    def step(self) -> list[Any]:
        """Run one step; returns new outputs."""
        with as_vllm():
            self._core.loop.check()
            with self._interrupts.watched(), self._interrupts.delayed():
                stepped = self._core.loop.tick()
            if not stepped and not self._news and self._requests:
                self._core.loop.wait()  # for constraints that are being compiled
        outputs = []
        several, self._news = self._news, []
        for current in {id(news): news for news in several}.values():
            if current.finished:
                self._requests.pop(current.id, None)
            with as_vllm():
                output = current.take()
            if output is not None:
                outputs.append(with_vllm_names(output))
        return outputs

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """Abort requests; they produce no more output."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            state = self._requests.pop(name, None)
            for identity in [] if state is None else self._outputs.abort(state):
                self._core.loop.abort(identity)

    def has_unfinished_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """The number of unfinished requests."""
        return len(self._requests)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache."""
        self._core.reset_prefix_cache()
        return True

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return EngineFacts(self.info, self._tokenizer).tokenizer

    tokenizer = property(get_tokenizer)

    @property
    def model_config(self) -> ModelFacts:
        """Facts about the model."""
        return ModelFacts.of(self.info)

    def get_model_config(self) -> ModelFacts:
        """Facts about the model."""
        return self.model_config

    def shutdown(self) -> None:
        """Release the model."""
        self._core.stop()
