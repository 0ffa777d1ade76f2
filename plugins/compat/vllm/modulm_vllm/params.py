"""vLLM's request parameters: mutable, validated on creation.

`native` converts them to modulm's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Self

import attrs
from attrs import define, field

from modulm.contracts import sampling as native_types
from modulm.contracts.sampling import OutputKind
from modulm_expert_routes import with_replay
from modulm_frontend import beam_search, lora
from modulm_frontend.validation import problem
from modulm_vllm.failures import as_vllm

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "LoRARequest",
    "PoolingParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
    "native",
    "native_adapter",
    "native_beams",
    "of_native",
]

#: When an output is produced, and what it contains.
RequestOutputKind = OutputKind


class SamplingType(IntEnum):
    """How tokens are sampled."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


@define
class StructuredOutputsParams:
    """A constraint on the output; exactly one of the first six fields is set."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_fallback: bool = field(default=False, kw_only=True)
    disable_any_whitespace: bool = field(default=False, kw_only=True)
    disable_additional_properties: bool = field(default=False, kw_only=True)
    whitespace_pattern: str | None = field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        constraints = [name for name in _CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(constraints) != 1:
            raise ValueError(
                f"exactly one kind of constraint is needed, of {', '.join(_CONSTRAINTS)}; "
                f"given: {', '.join(constraints) or 'none'}"
            )

    def native(self) -> native_types.StructuredOutputs:
        """Convert to modulm's form. There is no fallback, as with `disable_fallback`."""
        table = attrs.asdict(self, recurse=False)
        del table["disable_fallback"]
        return native_types.StructuredOutputs(**table)


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@define
class GuidedDecodingParams(StructuredOutputsParams):
    """The older name of StructuredOutputsParams. backend: of one request; the engine's counts."""

    backend: str | None = field(default=None, kw_only=True)

    def native(self) -> native_types.StructuredOutputs:
        table = attrs.asdict(self, recurse=False)
        del table["disable_fallback"], table["backend"]
        return native_types.StructuredOutputs(**table)

    @classmethod
    def from_optional(cls, **fields: Any) -> GuidedDecodingParams | None:
        """Create a constraint; None if no kind is given."""
        values = {key: value for key, value in fields.items() if value is not None}
        return cls(**values) if any(key in _CONSTRAINTS for key in values) else None


def _strings(value: str | Sequence[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _ids(value: Sequence[int] | None) -> list[int]:
    return list(value or ())


@define
class RepetitionDetectionParams:
    """Patterns of tokens that end an output when they are repeated. max_pattern_size 0: none."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


@define
class SamplingParams:
    """Sampling parameters of a request. Raises ValueError naming the field."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default=None, converter=_strings)
    stop_token_ids: list[int] = field(default=None, converter=_ids)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: OutputKind = OutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] = field(default=None, converter=_strings)
    best_of: int | None = field(default=None, kw_only=True)
    thinking_token_budget: int | None = field(default=None, kw_only=True)
    logprob_token_ids: list[int] = field(default=None, converter=_ids, kw_only=True)
    repetition_detection: RepetitionDetectionParams | dict[str, int] | None = field(
        default=None, kw_only=True
    )
    stream_interval: int | None = field(default=None, kw_only=True)
    guided_decoding: StructuredOutputsParams | None = field(default=None, kw_only=True)
    logits_processors: Sequence[Any] | None = field(default=None, kw_only=True)
    flat_logprobs: bool = field(default=False, kw_only=True)
    skip_reading_prefix_cache: bool | None = field(default=None, kw_only=True)
    skip_clone: bool = field(default=False, kw_only=True)
    routed_experts_prompt_start: int = field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.logits_processors:
            raise ValueError(
                "logits_processors of one request are not supported, as in vLLM's V1: pass "
                "LLM(logits_processors=[...]) a class (docs/plugins-logits-processor.md)"
            )
        if self.flat_logprobs:
            raise ValueError("flat_logprobs is not supported: logprobs are a table per position")
        self._check()

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Create parameters; None means the default."""
        return cls(**{key: value for key, value in fields.items() if value is not None})

    def _check(self) -> None:
        for name, value in self._table().items():
            message = problem(name, value)
            if message is not None:
                raise ValueError(f"{name} {message}, got {value!r}")

    def _table(self) -> dict[str, Any]:
        table = {key: getattr(self, key) for key in _NATIVE}
        structured = self.structured_outputs or self.guided_decoding
        repetition = self.repetition_detection
        if isinstance(repetition, RepetitionDetectionParams):
            table["repetition_detection"] = attrs.asdict(repetition)
        table["extra_args"] = with_replay(self.extra_args, self.routed_experts_prompt_start, None)
        return {
            **table,
            "structured_outputs": structured.native() if structured is not None else None,
        }

    @property
    def sampling_type(self) -> SamplingType:
        """How tokens are sampled."""
        if self.temperature < 1e-5:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    def clone(self) -> Self:
        """Return a mutable copy."""
        return copy.deepcopy(self)

    def native(self) -> native_types.SamplingParams:
        """Convert to modulm's form, including changes since creation."""
        self._check()
        return native_types.SamplingParams(**self._table())


#: Fields that modulm's parameters have too.
_NATIVE = [
    attribute.name
    for attribute in attrs.fields(SamplingParams)
    if attribute.name in attrs.fields_dict(native_types.SamplingParams)
]


@define
class PoolingParams:
    """Parameters of a pooling request. activation, softmax: older names of use_activation."""

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    task: str | None = None
    activation: bool | None = field(default=None, kw_only=True)
    softmax: bool | None = field(default=None, kw_only=True)
    extra_kwargs: dict[str, Any] | None = field(default=None, kw_only=True)

    def clone(self) -> Self:
        """Return a mutable copy."""
        return copy.deepcopy(self)

    def native(self) -> native_types.PoolingParams:
        """Convert to modulm's form."""
        activation = next((v for v in (self.use_activation, self.activation, self.softmax)
                      if v is not None), None)  # fmt: skip
        pooling = native_types.PoolingParams(
            dimensions=self.dimensions,
            normalize=self.normalize,
            use_activation=activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            extra_args=self.extra_kwargs,
        )
        return pooling if self.task is None else attrs.evolve(pooling, task=self.task)


@define
class BeamSearchParams:
    """Parameters of a beam search."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


@define(frozen=True)
class LoRARequest:
    """An adapter for a prompt: a name, a unique number from 1 up, and its folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = field(default=None, eq=False)
    tensorizer_config_dict: dict[str, Any] | None = field(default=None, eq=False)
    load_inplace: bool = field(default=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1, got {self.lora_int_id}")
        if not self.lora_path:
            raise ValueError("lora_path must name the adapter's folder")
        if self.tensorizer_config_dict is not None:
            raise ValueError("tensorizer_config_dict: adapters are read as safetensors")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


def native(value: Any) -> Any:
    """Convert parameters of vLLM's or modulm's kind to modulm's: one, several or None."""
    if isinstance(value, SamplingParams | PoolingParams):
        with as_vllm():
            return value.native()
    if isinstance(value, Sequence):
        return [native(one) for one in value]
    return value


def native_adapter(value: Any) -> Any:
    """Convert adapters to modulm's form: one, one per prompt, or None."""
    if isinstance(value, LoRARequest):
        return lora.LoRARequest(value.lora_name, value.lora_int_id, value.lora_path)
    if isinstance(value, Sequence):
        return [native_adapter(one) for one in value]
    return value


def native_beams(value: Any) -> beam_search.BeamSearchParams:
    """Convert beam search parameters to modulm's form."""
    if isinstance(value, BeamSearchParams):
        return beam_search.BeamSearchParams(**attrs.asdict(value))
    params: beam_search.BeamSearchParams = value
    return params


def of_native(params: native_types.SamplingParams) -> SamplingParams:
    """Convert modulm's parameters to vLLM's mutable ones."""
    table = {name: getattr(params, name) for name in _NATIVE}
    structured = table.pop("structured_outputs")
    sampling = SamplingParams(**{key: _mutable(value) for key, value in table.items()})
    if structured is not None:
        sampling.structured_outputs = StructuredOutputsParams(
            **attrs.asdict(structured, recurse=False)
        )
    return sampling


def _mutable(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
