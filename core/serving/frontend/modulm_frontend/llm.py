"""LLM: many prompts in, all answers out. The engine runs in the caller's thread."""

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
    BeamSearchOutput,
    ClassificationOutput,
    EmbeddingOutput,
    PoolingRequestOutput,
    RequestOutput,
    Statistics,
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
from modulm_frontend.beam_search import BeamSearchParams
from modulm_frontend.input_processor import (
    BeamSearchRequest,
    InputProcessor,
    PendingRequest,
)
from modulm_frontend.lora import LoRARequest, OfflineAdapters
from modulm_frontend.output_processor import OutputProcessor, RequestState
from modulm_frontend.profile import StepProfile
from modulm_frontend.thoughts import ThoughtReader

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.text.tokenizer import Tokenizer
    from modulm_frontend.keywords import LLMFlags

__all__ = ["LLM"]

T = TypeVar("T")
#: A text, or a table with `text`, or with `content`, parts as messages have them.
PairSide: TypeAlias = "str | Mapping[str, Any]"


class LLM:
    """A model for offline use.

        with LLM(model="demo") as llm:
            outputs = llm.generate(["One", "Two"], SamplingParams(max_tokens=20))

    Keywords are the flags of `modulm serve` with underscores. Not safe for use by several
    threads. Raises ConfigError, CheckpointError or PluginError where it cannot start.
    """

    def __init__(self, model: str = "demo", **flags: Unpack[LLMFlags]) -> None:
        self._open(keywords(model=model, **flags).config)

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """An LLM of a configuration that is complete."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        parallel = config.parallel
        if parallel.data_parallel_size > 1 and parallel.data_parallel_group is None:
            raise ConfigError(
                "data_parallel_size",
                "replicas are for servers: make one LLM for each, or use `modulm serve`",
            )
        plugins = manager.current()
        self._core = EngineCore(config, plugins, self, "offline")
        self.info = self._core.info
        self.tokenizer = self._core.tokenizer
        processors = processor_classes(config.model.logits_processors, plugins)
        self._input_processor = InputProcessor(self.info, self.tokenizer, plugins, processors)
        listeners = plugins.gather("modulm_request_listeners", config=config)
        self._output_processor = OutputProcessor(listeners=listeners)
        self._adapters = OfflineAdapters(self._core)
        self._numbers = count()
        self._done: list[RequestState] = []
        self._open_now = True

    # What the engine tells (see `loop.Listener`).

    def events(self, events: StepEvents) -> None:
        """A step is done."""
        news, stopped = self._output_processor.process(events)
        for identity in stopped:
            self._core.loop.abort(identity)
        self._done += [state for state in news if state.finished]

    def died(self, error: EngineDead) -> None:
        """The engine cannot go on."""
        self._done += self._output_processor.fail_all(error)

    # What callers ask.

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises UnsupportedError if there is none."""
        if self.tokenizer is None:
            raise UnsupportedError("there is no tokenizer: skip_tokenizer_init was given")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where it is given no parameters."""
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
        """Answer every prompt, in the order given. Prompts are text, token ids, or tables.

        sampling_params, lora_request: for all, or one per prompt. Raises RequestError if a prompt
        or a parameter is wrong, CheckpointError if an adapter is, before anything runs; what goes
        wrong later is in that output's finish_reason.
        """
        listed = _listed(prompts)
        params = _spread(sampling_params, len(listed), self.info.default_params())
        finals = [given.with_(output_kind=OutputKind.FINAL_ONLY) for given in params]
        adapters = _spread(lora_request, len(listed), None)
        pending = [
            self._input_processor.process(
                prompt,
                given,
                str(next(self._numbers)),
                priority=priority[place] if priority is not None else 0,
                cache_salt=cache_salt,
                adapter=None if lora is None else lora.lora_name,
            )
            for place, (prompt, given, lora) in enumerate(
                zip(listed, finals, adapters, strict=True)
            )
        ]
        return self._run(list(map(self._adapters.apply, pending, adapters)), use_tqdm)

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
        """Answer one conversation, or each of several. Raises ImportError without modulm-chat.

        Parts of messages may be media: `image_url` (a data: URL or a path), `image_pil`,
        `image`, `audio`, `video`, with `uuid`; mm_processor_kwargs: for the model's processor.

        Thoughts are the answers' `reasoning`, where modulm-parsing is installed and has a reasoning
        parser for the model. chat_template: in place of the checkpoint's, what `--chat-template`
        takes.
        """
        encode_chat = public_name("modulm_chat", "encode_chat", __name__)
        if reasoning_effort is not None:
            told = public_name("modulm_parsing", "thinking_variables", __name__)
            parser = self.info.config.structured_outputs.reasoning_parser
            given = chat_template_kwargs or {}
            chat_template_kwargs = {**told(parser, reasoning_effort), **given}
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
        """The `beam_width` best answers to each prompt, as transformers' beam search finds them.

        Raises RequestError for a wrong prompt or parameter, before anything runs.
        """
        searches = [
            self._input_processor.beam_search(prompt, params, str(next(self._numbers)))
            for prompt in _listed(prompts)
        ]
        found = []
        for search in tqdm(searches, disable=not use_tqdm, desc="Beams"):
            while search.running:
                search.update(*self._run([search.next_step(str(next(self._numbers)))], False))
            found.append(_beams(search))
        return found

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Pool every prompt; `outputs.data` is a numpy array. lora_request: as in `generate`.

        pooling_task: comes before the parameters' own; without either the model's first one.
        """
        listed = _listed(prompts)
        default = PoolingParams(task=self.info.tasks[0])
        params = _spread(pooling_params, len(listed), default)
        if pooling_task is not None:
            params = [evolve(given, task=pooling_task) for given in params]
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
        """One embedding per prompt: `outputs.embedding`."""
        found = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request,
            pooling_task="embed",
        )  # fmt: skip
        for output in found:
            output.outputs = EmbeddingOutput(output.outputs.data.tolist())
        return found

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Probabilities of the model's classes for every prompt: `outputs.probs`."""
        found = self.encode(
            prompts, pooling_params, use_tqdm=use_tqdm, lora_request=lora_request,
            pooling_task="classify",
        )  # fmt: skip
        for output in found:
            output.outputs = ClassificationOutput(output.outputs.data.tolist())
        return found

    def reward(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """A reward model's rating of every token, or of every step: `outputs.data`."""
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
        """How well texts go together: `outputs.score`, one per pair; also with media, as
        {"content": [parts as in messages]}.

        One text in `data_1` goes with each of `data_2`. A model with one class is given each
        pair, made into a prompt by `chat_template` if there is one; of an embedding model it is
        the similarity of two embeddings, the cosine if its files say nothing else. lora_request:
        for all pairs.
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
        """Tell `statistics` of every step and request; `modulm_server` has one for Prometheus."""
        self._output_processor.statistics = statistics

    def start_profile(self) -> None:
        """Record the engine's steps. Raises UnsupportedError without profiler_config."""
        self._profile.start()

    def stop_profile(self) -> None:
        """Write what was recorded to the folder of profiler_config."""
        self._profile.stop()

    @cached_property
    def _profile(self) -> StepProfile:
        return StepProfile(self._core)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes."""
        self._core.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of the caches, with level 2 that of the weights as well.

        Raises UnsupportedError without enable_sleep_mode.
        """
        self._core.sleep(level)

    def wake_up(self) -> None:
        """Take the memory again; weights that were given back are loaded anew."""
        self._core.wake_up()

    def shutdown(self) -> None:
        """Release the model; may be called twice. Nothing can be asked of it any more."""
        self._open_now = False
        self._core.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    # How it is done.

    def _pool(
        self,
        jobs: Sequence[PoolingJob],
        use_tqdm: bool | Callable[..., Any],
        adapters: Sequence[LoRARequest | None],
    ) -> list[Any]:
        """Run the parts of all jobs together; the jobs' answers in their order."""
        pending = [
            self._adapters.apply(
                self._input_processor.process(ids, params, str(next(self._numbers))), lora
            )
            for job, lora in zip(jobs, adapters, strict=True)
            for ids, params in job.parts
        ]
        found = iter(self._run(pending, use_tqdm))
        return [done for job in jobs for done in job.join([next(found) for _ in job.parts])]

    def _run(
        self, pending: Sequence[PendingRequest], use_tqdm: bool | Callable[..., Any]
    ) -> list[Any]:
        """Run the requests to their end; outputs in their order. Constraints come first."""
        if not self._open_now:
            raise EngineDead("this LLM was shut down: make a new one")
        self._done.clear()
        bar = _bar(use_tqdm, len(pending))
        try:
            for request in pending:
                self._output_processor.add(request.state)
                self._core.submit(*request.requests)
            asked = (part.id for request in pending for part in request.requests)
            self._core.loop.wait_prepared(asked)
            while len(self._output_processor):
                self._core.loop.check()
                if not self._core.loop.tick() and len(self._output_processor):
                    self._core.loop.wait()  # for constraints that are being compiled
                bar.update(len(self._done))
                self._done.clear()
        except BaseException:
            self._withdraw(pending)
            raise
        finally:
            bar.close()
        return [_final(request.state) for request in pending]

    def _withdraw(self, pending: Sequence[PendingRequest]) -> None:
        """The caller will not wait: what is left of the requests leaves the engine."""
        for request in pending:
            for identity in self._output_processor.abort(request.state):
                self._core.loop.abort(identity)
        if self._core.loop.dead is None:
            self._core.loop.tick()


def _listed(prompts: Any) -> list[Any]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = list(prompts)
    return [listed] if listed and all(isinstance(item, int) for item in listed) else listed


def _spread(given: T | Sequence[T] | None, amount: int, default: T) -> list[T]:
    """One value per prompt."""
    if given is None:
        return [default] * amount
    if not isinstance(given, Sequence):
        return [given] * amount
    if len(given) != amount:
        raise RequestError(f"{amount} prompts and {len(given)} parameters were given", "params")
    return list(given)


def _final(state: RequestState) -> Any:
    """What the caller gets. A request that the engine refused is an answer of its own here, so
    that it does not take the others with it.
    """
    if isinstance(state.error, RequestError) and state.choices:
        refused, state.error = state.error, None
        for choice in state.choices:
            choice.finish(Finish(state.id, "error", None, refused))
    output = state.take()
    if output is None:
        raise ModulmError(f"request {state.id} has no answer")
    return output


def _beams(search: BeamSearchRequest) -> BeamSearchOutput:
    """The sequences of a search that is over, with their texts."""
    choices, sequences = search.state.choices, search.beams.answers()
    if choices[0].reason == "error":
        raise ModulmError(str(choices[0].stop))
    for choice, sequence in zip(choices, sequences, strict=True):
        sequence.text, sequence.logprobs = choice.text, choice.logprobs or sequence.logprobs
    return BeamSearchOutput(sequences)


def _bar(wanted: bool | Callable[..., Any], total: int) -> Any:
    make: Any = wanted if callable(wanted) else tqdm
    return make(total=total, desc="Prompts", disable=not wanted, dynamic_ncols=True)
