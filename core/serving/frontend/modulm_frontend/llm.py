"""Offline inference: `LLM` runs the engine in the caller's thread, on batches of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar, Unpack

from attrs import evolve
from tqdm import tqdm

from modulm.config.sources import keywords
from modulm.contracts.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingRequestOutput,
    RequestOutput,
)
from modulm.contracts.pooler import PoolingJob, paired
from modulm.contracts.requests import Finish, PromptLike, StepEvents
from modulm.contracts.sampling import OutputKind, PoolingParams, SamplingParams
from modulm.engine.core.engine_core import EngineCore
from modulm.engine.sampling.logits_processors import processor_classes
from modulm.errors import (
    ConfigError,
    EngineDead,
    ModulmError,
    RequestError,
    UnsupportedError,
)
from modulm.plugins import manager
from modulm.plugins.moved import public_name
from modulm_frontend.beam_search import BeamSearchOutput, BeamSearchParams
from modulm_frontend.defaults import sampling_defaults
from modulm_frontend.input_processor import (
    BeamSearchRequest,
    InputProcessor,
    PendingRequest,
)
from modulm_frontend.interrupts import Interrupts
from modulm_frontend.lora import LoRARequest, OfflineAdapters
from modulm_frontend.output_processor import OutputProcessor, RequestState
from modulm_frontend.profile import StepProfile
from modulm_frontend.statistics import Statistics
from modulm_frontend.thoughts import ThoughtReader
from modulm_frontend.weight_updates import WeightUpdates
from modulm_frontend.worker_calls import check_call, run_on_model
from modulm_tokenizers.tokenizer import open_tokenizer
from modulm_weight_transfer.engine import EngineWeights, wakes_weights_alone

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.tokenizer import Tokenizer
    from modulm_frontend.keywords import LLMFlags

__all__ = ["LLM"]

T = TypeVar("T")
#: A text, a mapping with `text`, or a mapping with `content`: a list of message parts.
PairSide: TypeAlias = "str | Mapping[str, Any]"


class LLM(WeightUpdates):
    """A model for offline use.

        with LLM(model="demo") as llm:
            outputs = llm.generate(["One", "Two"], SamplingParams(max_tokens=20))

    Keywords are the flags of `modulm serve` with underscores. Not thread-safe. Raises
    ConfigError, CheckpointError or PluginError if the engine cannot start.
    """

    def __init__(self, model: str = "demo", **flags: Unpack[LLMFlags]) -> None:
        self._open(keywords(model=model, **flags).config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """Create an LLM from a complete configuration."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        parallel = config.parallel
        if parallel.data_parallel_size > 1 and parallel.data_parallel_group is None:
            raise ConfigError(
                "data_parallel_size",
                "LLM runs one replica: create an LLM for each, or use `modulm serve`",
            )
        if config.value("prefill_replicas"):
            raise ConfigError("prefill_replicas", "LLM runs one replica: use `modulm serve`")
        if (config.value("nnodes") or 1) > 1:
            raise ConfigError(
                "nnodes",
                "LLM starts no replicas on other machines: use `modulm serve`, or for one model "
                "over several machines --distributed-executor-backend ray without --nnodes",
            )
        plugins = manager.current()
        self._core = EngineCore(config, plugins, self, "offline", sampling_defaults)
        self.info = self._core.info
        self.tokenizer = open_tokenizer(self.info.config, self.info.path)
        processors = processor_classes(config.model.logits_processors, plugins)
        self._input_processor = InputProcessor(self.info, self.tokenizer, plugins, processors)
        listeners = plugins.gather("modulm_request_listeners", config=config)
        self._output_processor = OutputProcessor(listeners=listeners)
        self._adapters = OfflineAdapters(self._core)
        self._weights = EngineWeights(self._core)
        self._numbers = count()
        self._done: list[RequestState] = []
        self._enqueued: list[PendingRequest] = []
        self._open_now = True
        self._end = "shut down"
        self._interrupts = Interrupts(self._interrupted_within_step)

    # Called by the engine (see `loop.Listener`).

    def events(self, events: StepEvents) -> None:
        """Process the events of a finished step."""
        news, stopped = self._output_processor.process(events)
        for identity in stopped:
            self._core.loop.abort(identity)
        self._done += [state for state in news if state.finished]

    def died(self, error: EngineDead) -> None:
        """Fail all requests, since the engine has stopped."""
        self._done += self._output_processor.fail_all(error)

    # The public interface.

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises UnsupportedError if there is none."""
        if self.tokenizer is None:
            raise UnsupportedError("no tokenizer is loaded, because skip_tokenizer_init is set")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that `generate` uses by default."""
        return self.info.default_params()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Generate an output for every prompt, in the same order.

        Prompts are texts, lists of token ids, or mappings. sampling_params, lora_request: one for
        all prompts, or one per prompt. Raises RequestError for an invalid prompt or parameter and
        CheckpointError for an invalid adapter, both before anything runs. A failure while running
        shows in that output's finish_reason.
        """
        pending = self._pending(
            prompts, sampling_params, lora_request, priority=priority, cache_salt=cache_salt
        )
        return self._run(pending, use_tqdm)

    def enqueue(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
    ) -> list[str]:
        """Check requests and keep them for `wait_for_completion`; returns their ids.

        Arguments and errors are those of `generate`.
        """
        pending = self._pending(
            prompts, sampling_params, lora_request, priority=priority, cache_salt=cache_salt
        )
        self._enqueued += pending
        return [request.state.id for request in pending]

    def wait_for_completion(
        self, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Run all enqueued requests together; returns their outputs in the order of `enqueue`."""
        pending, self._enqueued = self._enqueued, []
        return self._run(pending, use_tqdm)

    def _pending(
        self,
        prompts: Any,
        sampling_params: Any,
        lora_request: Any,
        *,
        priority: Sequence[int] | None,
        cache_salt: str | None,
    ) -> list[PendingRequest]:
        listed = _listed(prompts)
        params = _spread(sampling_params, len(listed), self.info.default_params())
        finals = [
            request_params.with_(output_kind=OutputKind.FINAL_ONLY) for request_params in params
        ]
        adapters = _spread(lora_request, len(listed), None)
        pending = [
            self._input_processor.process(
                prompt,
                request_params,
                str(next(self._numbers)),
                priority=priority[index] if priority is not None else 0,
                cache_salt=cache_salt,
                adapter=None if lora is None else lora.lora_name,
            )
            for index, (prompt, request_params, lora) in enumerate(
                zip(listed, finals, adapters, strict=True)
            )
        ]
        return list(map(self._adapters.apply, pending, adapters))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation or of several.

        Message parts may be media: `image_url` (a data: URL or a path), `image_pil`, `image`,
        `audio` or `video`, each with an optional `uuid`. mm_processor_kwargs: options of the
        model's processor. chat_template: replaces the checkpoint's template; takes the same values
        as `--chat-template`.

        If modulm-parsing is installed and has a reasoning parser for the model, the outputs carry
        the thoughts in `reasoning`. Raises ImportError without modulm-chat.
        """
        encode_chat = public_name("modulm_chat", "encode_chat", __name__)
        if reasoning_effort is not None:
            thinking_variables = public_name("modulm_parsing", "thinking_variables", __name__)
            parser = self.info.config.structured_outputs.reasoning_parser
            kwargs = chat_template_kwargs or {}
            chat_template_kwargs = {**thinking_variables(parser, reasoning_effort), **kwargs}
        if chat_template is not None:
            chat_template = public_name("modulm_chat", "load_template", __name__)(chat_template)
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        tokenizer = LLM.get_tokenizer(self)
        prompts: list[PromptLike] = []
        for conversation in conversations:
            plain, media = self._input_processor.take_media(conversation)
            ids, text = encode_chat(
                plain,
                tokenizer=tokenizer,
                tools=tools,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                kwargs=chat_template_kwargs,
            )
            prompts.append({"prompt": text, "prompt_token_ids": ids, "multi_modal_data": media,
                            "mm_processor_kwargs": mm_processor_kwargs})  # fmt: skip
        params = _spread(sampling_params, len(prompts), self.info.default_params())
        if self._thoughts is None:
            return self.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)
        tuned = list(map(self._thoughts.tuned, params))
        outputs = self.generate(prompts, tuned, use_tqdm=use_tqdm, lora_request=lora_request)
        for output in outputs:
            self._thoughts.split(output, chat_template_kwargs or {})
        return outputs

    @cached_property
    def _thoughts(self) -> ThoughtReader | None:
        return ThoughtReader.of(self.info.config, self.get_tokenizer())

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Find the `beam_width` best sequences for each prompt, as transformers' beam search does.

        Raises RequestError for an invalid prompt or parameter, before anything runs.
        """
        searches = [
            self._input_processor.beam_search(prompt, params, str(next(self._numbers)))
            for prompt in _listed(prompts)
        ]
        outputs = []
        for search in tqdm(searches, disable=not use_tqdm, desc="Beams"):
            while search.running:
                search.update(*self._run([search.next_step(str(next(self._numbers)))], False))
            outputs.append(_beams(search))
        return outputs

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Pool every prompt into `outputs.data`, a numpy array. lora_request: as in `generate`.

        pooling_task: overrides the task of pooling_params. The default is the model's first task.
        """
        listed = _listed(prompts)
        default = PoolingParams(task=self.info.tasks[0])
        params = _spread(pooling_params, len(listed), default)
        if pooling_task is not None:
            params = [evolve(item, task=pooling_task) for item in params]
        jobs = map(self._input_processor.pooling_job, listed, params)
        return self._pool(list(jobs), use_tqdm, _spread(lora_request, len(listed), None))

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Compute one embedding per prompt: `outputs.embedding`."""
        outputs = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request,
            pooling_task="embed",
        )  # fmt: skip
        for output in outputs:
            output.outputs = EmbeddingOutput(output.outputs.data.tolist())
        return outputs

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Compute the class probabilities of every prompt: `outputs.probs`."""
        outputs = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request,
            pooling_task="classify",
        )  # fmt: skip
        for output in outputs:
            output.outputs = ClassificationOutput(output.outputs.data.tolist())
        return outputs

    def reward(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Compute a reward model's scores, per token or per step: `outputs.data`."""
        return self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request,
            pooling_task="reward",
        )  # fmt: skip

    def score(
        self,
        data_1: PairSide | Sequence[PairSide],
        data_2: PairSide | Sequence[PairSide],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Score pairs of texts: `outputs.score`, one per pair.

        A single text in `data_1` is paired with each item of `data_2`. An item with media is
        {"content": [message parts]}. A model with one class reads each pair as one prompt, which
        `chat_template` formats if there is one. An embedding model compares two embeddings, by
        cosine similarity unless its files name another measure. lora_request: for all pairs.
        """
        contents = self._input_processor.pair_contents
        left, right = paired(contents(data_1, "data_1"), contents(data_2, "data_2"))
        job = self._input_processor.texts.pairs(
            left,
            right,
            pooling_params or PoolingParams(),
            template=chat_template,
            variables=chat_template_kwargs,
        )
        return self._pool([job], use_tqdm, [lora_request])

    def count_by(self, statistics: Statistics) -> None:
        """Report every step and request to `statistics` from now on.

        `modulm_server.engine.metrics.Metrics("name")` counts what servers show at /metrics. For
        vLLM's `LLM.get_metrics()`, use `LLM` of modulm-vllm, which counts from the start.
        """
        self._output_processor.statistics = statistics

    def start_profile(self) -> None:
        """Record the engine's steps. Raises UnsupportedError without profiler_config."""
        self._profile.start()

    def stop_profile(self) -> None:
        """Stop recording and write the trace to the folder of profiler_config."""
        self._profile.stop()

    @cached_property
    def _profile(self) -> StepProfile:
        return StepProfile(self._core)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function in every worker; returns the results by rank.

        method: the name of a worker function (entry-point group `modulm.worker_functions`) or of a
        method that `worker_cls` adds, or a function whose first argument is the worker. Workers in
        other processes import functions by name; arguments and results are then plain values:
        numbers, strings, bytes, lists, dicts and numpy arrays. timeout: seconds to wait; the call
        itself continues, and the next step waits for it.

        Raises NotFound for an unknown name, EngineError naming the rank whose function raised, and
        EngineTimeout. The model stays usable in each case.
        """
        self._check_open()
        check_call(method, timeout)
        return self._core.executor.call(method, args, kwargs, timeout)

    def apply_model(self, function: Callable[[Any], T]) -> list[T]:
        """Call a function with the model of every worker; returns the results by rank.

        Restrictions on functions and results are those of `collective_rpc`.
        """
        return self.collective_rpc(run_on_model, args=(function,))

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache."""
        self._core.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache, and at level 2 that of the weights too. At level 1 the
        weights of devices go to host memory. Level 0 frees nothing.

        Raises UnsupportedError without enable_sleep_mode.
        """
        if level == 0:
            self._weights.doze()
            return
        self._core.sleep(level)
        self._weights.release(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again, and reload weights that were freed.

        tags: "weights" alone brings the weights back while the engine sleeps, to update them;
        "kv_cache" and None wake it up. Raises RequestError.
        """
        if wakes_weights_alone(tags, self._weights.state.asleep):
            self._weights.restore()
            return
        self._weights.restore()
        self._core.wake_up()
        self._weights.reload()

    def is_sleeping(self) -> bool:
        """Whether `sleep` was called, at any level, and `wake_up` not yet."""
        return self._weights.state.asleep is not None or self._core.is_sleeping()

    def shutdown(self) -> None:
        """Release the model. The LLM cannot be used afterwards; a second call does nothing."""
        self._open_now = False
        self._core.stop()

    def __repr__(self) -> str:
        state = "" if self._open_now else f", {self._end}"
        return f"{type(self).__name__}({self.info.config.model.model!r}{state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    # Internals.

    def _check_open(self) -> None:
        if not self._open_now:
            raise EngineDead(f"this LLM was {self._end}: create a new one")
        self._core.loop.check()

    def _pool(
        self,
        jobs: Sequence[PoolingJob],
        use_tqdm: bool | Callable[..., Any],
        adapters: Sequence[LoRARequest | None],
    ) -> list[Any]:
        """Run the parts of all jobs as one batch; returns the jobs' results in order."""
        pending = [
            self._adapters.apply(
                self._input_processor.process(ids, params, str(next(self._numbers))), lora
            )
            for job, lora in zip(jobs, adapters, strict=True)
            for ids, params in job.parts
        ]
        outputs = iter(self._run(pending, use_tqdm))
        return [result for job in jobs for result in job.join([next(outputs) for _ in job.parts])]

    def _run(
        self, pending: Sequence[PendingRequest], use_tqdm: bool | Callable[..., Any]
    ) -> list[Any]:
        """Run requests until all are finished. Grammars compile before the first step."""
        self._check_open()
        self._weights.check()
        self._done.clear()
        with self._interrupts.watched():
            self._run_steps(pending, _bar(use_tqdm, len(pending)))
        return [_final(request.state) for request in pending]

    def _run_steps(self, pending: Sequence[PendingRequest], bar: Any) -> None:
        try:
            for request in pending:
                self._output_processor.add(request.state)
                self._core.submit(*request.requests)
            request_ids = (part.id for request in pending for part in request.requests)
            self._core.loop.wait_prepared(request_ids)
            while len(self._output_processor):
                self._core.loop.check()
                with self._interrupts.delayed():
                    stepped = self._core.loop.tick()
                if not stepped and len(self._output_processor):
                    self._core.loop.wait()  # for constraints that are being compiled
                bar.update(len(self._done))
                self._done.clear()
        except BaseException:
            with self._interrupts.delayed():
                self._withdraw(pending)
            raise
        finally:
            bar.close()

    def _withdraw(self, pending: Sequence[PendingRequest]) -> None:
        """Abort unfinished requests, because the caller stopped waiting."""
        for request in pending:
            for identity in self._output_processor.abort(request.state):
                self._core.loop.abort(identity)
        while self._open_now and self._core.loop.dead is None and self._core.loop.tick():
            pass  # steps that were submitted already

    def _interrupted_within_step(self) -> None:
        """Close: the interrupted step has left the engine in an unknown state."""
        self._open_now, self._end = False, "interrupted within a step"


def _listed(prompts: Any) -> list[Any]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = list(prompts)
    return [listed] if listed and all(isinstance(item, int) for item in listed) else listed


def _spread(value: T | Sequence[T] | None, amount: int, default: T) -> list[T]:
    """Return `amount` values: the given ones, the same one for all, or the default."""
    if value is None:
        return [default] * amount
    if not isinstance(value, Sequence):
        return [value] * amount
    if len(value) != amount:
        raise RequestError(f"{amount} prompts and {len(value)} parameters were given", "params")
    return list(value)


def _final(state: RequestState) -> Any:
    """The final output of a request. A refused request becomes an output with an error, so that
    it does not fail the rest of the batch.
    """
    if isinstance(state.error, RequestError) and state.choices:
        refused, state.error = state.error, None
        for choice in state.choices:
            choice.finish(Finish(state.id, "error", None, refused))
    output = state.take()
    if output is None:
        raise ModulmError(f"request {state.id} has no output")
    return output


def _beams(search: BeamSearchRequest) -> BeamSearchOutput:
    """The sequences of a finished search, with their texts."""
    choices, sequences = search.state.choices, search.beams.answers()
    if choices[0].reason == "error":
        raise ModulmError(str(choices[0].stop))
    for choice, sequence in zip(choices, sequences, strict=True):
        sequence.text, sequence.logprobs = choice.text, choice.logprobs or sequence.logprobs
    return BeamSearchOutput(sequences)


def _bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    make: Any = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc="Prompts", disable=not use_tqdm, dynamic_ncols=True)
