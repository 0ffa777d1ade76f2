"""vLLM's `LLM`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import evolve

from modulm.config.sources import keywords
from modulm.contracts.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from modulm.contracts.sampling import PoolingParams as NativePoolingParams
from modulm_frontend import llm as frontend
from modulm_frontend.beam_search import BeamSearchOutput
from modulm_server.engine.metrics import Metrics
from modulm_vllm.arguments import flags_for
from modulm_vllm.engine import EngineFacts
from modulm_vllm.failures import as_vllm, refuse
from modulm_vllm.metrics import Metric, read
from modulm_vllm.outputs import with_vllm_names
from modulm_vllm.params import (
    SamplingParams,
    native,
    native_adapter,
    native_beams,
    of_native,
)
from modulm_vllm.weight_loading import LocalWeights

__all__ = ["LLM"]


class LLM(frontend.LLM):
    """A model for offline use, with vLLM's arguments and outputs.

    Differences from modulm's own: parameters are mutable, invalid arguments raise ValueError,
    pooled data are tensors, the tokenizer is the transformers one, and the text of an answer
    includes the reasoning as generated.
    """

    def __init__(self, model: str = "demo", **flags: Any) -> None:
        with as_vllm():
            self._open(keywords(model=model, **flags_for(flags)).config)
        self._metrics = Metrics(self.info.models[0], adapters=self.info.limit("adapters", "slots"))
        if not self.info.config.observability.disable_log_stats:
            self.count_by(self._metrics)

    @cached_property
    def _local_weights(self) -> LocalWeights:
        return LocalWeights(self)

    def _run(self, *arguments: Any) -> list[Any]:
        self._local_weights.finish()
        return [with_vllm_names(output) for output in super()._run(*arguments)]

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache."""
        self._local_weights.finish()
        return super().reset_prefix_cache()

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        prompt_token_ids: Any = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Generate an output for every prompt, in order. prompt_token_ids: for older scripts."""
        inputs = prompts if prompts is not None else prompt_token_ids
        if inputs is None:
            raise ValueError("prompts: at least one is required")
        with as_vllm():
            return super().generate(
                inputs,
                native(sampling_params),
                use_tqdm=use_tqdm,
                lora_request=native_adapter(lora_request),
                priority=priority,
                cache_salt=cache_salt,
            )

    def enqueue(  # type: ignore[override]
        self,
        prompts: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Add requests for `wait_for_completion`; returns their ids."""
        refuse(tokenization_kwargs=tokenization_kwargs)
        with as_vllm():
            return super().enqueue(
                prompts,
                native(sampling_params),
                lora_request=native_adapter(lora_request),
                priority=priority,
            )

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Run all enqueued requests. output_type: ignored, since all outputs have one type."""
        with as_vllm():
            return super().wait_for_completion(use_tqdm=use_tqdm)

    def chat(  # type: ignore[override]
        self,
        messages: Any,
        sampling_params: Any = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or of several.

        The template determines the content format; chat_template_content_format is ignored.
        """
        if chat_template_content_format not in ("auto", "string", "openai"):
            raise ValueError("chat_template_content_format must be auto, string or openai")
        with as_vllm():
            return super().chat(
                messages,
                native(sampling_params),
                use_tqdm=use_tqdm,
                lora_request=native_adapter(lora_request),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                mm_processor_kwargs=mm_processor_kwargs,
            )

    @cached_property
    def _thoughts(self) -> None:
        """None, so that `chat` leaves reasoning in the text, as vLLM does."""
        return None

    def beam_search(
        self, prompts: Any, params: Any, lora_request: Any = None, use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:  # fmt: skip
        """Run a beam search for every prompt; the text of a sequence includes the prompt."""
        if lora_request is not None:
            raise ValueError("lora_request: beam search runs the base model")
        with as_vllm():
            outputs = super().beam_search(prompts, native_beams(params), use_tqdm=use_tqdm)
        if self.tokenizer is not None:
            for sequence in (s for output in outputs for s in output.sequences):
                sequence.text = self.tokenizer.decode(sequence.tokens)
        return outputs

    def encode(
        self,
        prompts: Any,
        pooling_params: Any = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Pool every prompt; `outputs.data` is a tensor."""
        refuse(tokenization_kwargs=tokenization_kwargs)
        if truncate_prompt_tokens is not None:
            changes = {"truncate_prompt_tokens": truncate_prompt_tokens}
            pooling_params = evolve(native(pooling_params) or NativePoolingParams(), **changes)
        outputs = self._encode(prompts, pooling_params, use_tqdm, lora_request, pooling_task)
        for output in outputs:
            output.outputs = PoolingOutput(torch.from_numpy(output.outputs.data.copy()))
        return outputs

    def _encode(
        self, prompts: Any, params: Any, use_tqdm: Any, lora: Any, task: str | None
    ) -> list[PoolingRequestOutput]:
        with as_vllm():
            return super().encode(
                prompts, native(params), use_tqdm=use_tqdm, lora_request=native_adapter(lora),
                pooling_task=task,
            )  # fmt: skip

    def reward(  # type: ignore[override]
        self, prompts: Any, *, pooling_params: Any = None, **more: Any
    ) -> list[PoolingRequestOutput]:
        """Compute a reward model's scores: `outputs.data`, a tensor."""
        return self.encode(prompts, pooling_params, pooling_task="reward", **more)

    def score(self, *texts: Any, **more: Any) -> list[PoolingRequestOutput]:
        """Score pairs of texts: `outputs.score`, one per pair."""
        if "pooling_params" in more:
            more["pooling_params"] = native(more["pooling_params"])
        if "lora_request" in more:
            more["lora_request"] = native_adapter(more["lora_request"])
        with as_vllm():
            return super().score(*texts, **more)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer."""
        with as_vllm():
            return super().get_tokenizer().backend

    def get_default_sampling_params(self) -> SamplingParams:  # type: ignore[override]
        """The checkpoint's recommended parameters; a mutable copy for `generate`."""
        return of_native(self.info.default_params())

    def get_metrics(self) -> list[Metric]:
        """The engine's statistics. Raises ValueError with disable_log_stats=True."""
        if self.info.config.observability.disable_log_stats:
            raise ValueError("get_metrics needs disable_log_stats=False")
        return read(self._metrics)

    @property
    def llm_engine(self) -> EngineFacts:
        """Facts about the engine."""
        return EngineFacts(self.info, self.tokenizer, self._local_weights.executor)

    @property
    def model_config(self) -> Any:
        """Facts about the model."""
        return self.llm_engine.model_config

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the memory of the KV cache, and at level 2 that of the weights too."""
        with as_vllm():
            self._local_weights.finish()
            super().sleep(level)

    def collective_rpc(self, *arguments: Any, **more: Any) -> list[Any]:
        """Call a function in every worker; returns the results by rank."""
        with as_vllm():
            return super().collective_rpc(*arguments, **more)

    def apply_model(self, func: Any) -> list[Any]:
        """Call a function with the model of every worker; returns the results by rank."""
        with as_vllm():
            return super().apply_model(func)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate memory again; `["weights"]` only that of the weights."""
        with as_vllm():
            super().wake_up(tags)

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise AttributeError(f"LLM.{name} is not in modulm-vllm: {_ABSENT[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


_ABSENT = {
    "preprocess_chat": "modulm_chat.encode_chat gives a conversation's token ids",
    "set_tokenizer": "LLM(tokenizer=...) says which one is used",
}
