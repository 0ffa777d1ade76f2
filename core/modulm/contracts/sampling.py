"""Sampling and pooling parameters of requests, and the logits processor contract.

Fields have the names and meanings of vLLM's SamplingParams and PoolingParams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from difflib import get_close_matches
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from attrs import evolve, field, frozen
from attrs import fields as attr_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = [
    "API",
    "LogitsProcessor",
    "OutputKind",
    "PoolingParams",
    "RowView",
    "SamplingParams",
    "StructuredOutputs",
]

API = 1


class OutputKind(Enum):
    """What each output of a stream contains."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@frozen
class StructuredOutputs:
    """A constraint on the text; exactly one of the first six fields is set."""

    json: str | Mapping[str, object] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _id_tuple(value: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(value or ())


def _ids(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


def _most_drafts(value: bool | int | None) -> int | None:
    """Convert False to 0 and True to None (no limit)."""
    return value if not isinstance(value, bool) else None if value else 0


class _Suggests(type):
    """Metaclass whose constructor suggests close field names for a misspelled one."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: object, **fields: object) -> object:
            try:
                return super().__call__(*args, **fields)
            except TypeError:
                known = [attribute.name for attribute in attr_fields(cls)]
                wrong = [name for name in fields if name not in known]
                if not wrong:
                    raise
                close = get_close_matches(wrong[0], known, n=3)
                hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
                raise TypeError(f"{cls.__name__} has no field {wrong[0]!r}{hint}") from None


@frozen(kw_only=True)
class SamplingParams(metaclass=_Suggests):
    """How the tokens of a request are sampled and when it ends.

    logprobs: number of best tokens to return in addition to the sampled one; -1: the vocabulary.
    logprob_token_ids: tokens to return log probabilities of instead of the best ones.
    repetition_detection: ends the output, for the reason "repetition", when its last tokens are a
    pattern of `min_pattern_size` to `max_pattern_size` tokens, `min_count` times in a row.
    stream_interval: least new tokens of each output of a stream after the first; the engine's
    `--stream-interval` if that is more.
    speculative: maximum drafted tokens per step; False or 0: none; True or None: chosen by the
    engine. It does not change the output distribution. Front ends check ranges and raise
    RequestError naming the field; the constructor does not.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_id_tuple)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = field(default=(), converter=_id_tuple)
    repetition_detection: Mapping[str, int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: OutputKind = OutputKind.CUMULATIVE
    stream_interval: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=_ids)
    bad_words: tuple[str, ...] = field(default=(), converter=_strings)
    structured_outputs: StructuredOutputs | None = None
    speculative: int | None = field(default=None, converter=_most_drafts)
    thinking_token_budget: int | None = None
    extra_args: Mapping[str, object] | None = None

    @property
    def greedy(self) -> bool:
        """Whether sampling is greedy (temperature below 1e-5, as in vLLM)."""
        return self.temperature < 1e-5

    def with_(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed."""
        return evolve(self, **changes)


@frozen(kw_only=True)
class PoolingParams:
    """Parameters of a pooling request.

    task: embed, classify, score, token_embed, ... truncation_side: side from which
    `truncate_prompt_tokens` removes tokens, "right" (default) or "left". prompt_name: the
    checkpoint's prompt to put before the text; "" for none. pool_from: first token that is pooled.
    second_text: first token of the second text, for models with token types.
    """

    task: str = "embed"
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    prompt_name: str | None = None
    pool_from: int = 0
    second_text: int | None = None
    extra_args: Mapping[str, object] | None = None


@frozen(eq=False)
class RowView:
    """A sequence as seen by logits processors; `output` grows while it runs."""

    row: int
    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]


class LogitsProcessor(ABC):
    """Changes the logits of some rows (group `modulm.logits_processors`, or a class by path).

    One object serves the engine and is notified when rows start and end. An exception in `admit`
    or `apply_row` fails only that row.
    """

    api: ClassVar[int | tuple[int, int]]
    #: Fields of SamplingParams that it implements. It is not called for rows that set none of
    #: them; if no processor implements a field, requests that set it are refused. If empty,
    #: `admit` is called for all rows.
    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self.device = device

    @classmethod
    def open(cls, config: Any, vocabulary: int, device: torch.device) -> Self:
        """Create the engine's instance. Override it to use `config`, the EngineConfig."""
        return cls(vocabulary, device)

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        """Raise RequestError for invalid parameters. Called in the front end."""

    @classmethod
    def validate_for(cls, params: SamplingParams, config: Any) -> None:
        """Validate parameters with the EngineConfig, or None if it is unknown."""
        cls.validate(params)

    @property
    def keeps_argmax(self) -> bool:
        """Whether greedy rows may skip this processor."""
        return False

    @abstractmethod
    def admit(self, view: RowView) -> bool:
        """Start a row; return whether to process its logits."""

    def release(self, row: int) -> None:
        """Forget a row that was admitted."""

    @abstractmethod
    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        """Process one row's logits, [vocabulary] fp32, in place or as a new tensor."""

    def apply(
        self, views: Sequence[RowView], logits: torch.Tensor, index: Sequence[int]
    ) -> torch.Tensor:
        """Process the admitted rows of a step. logits: [rows, vocabulary]; index: of each view.

        The default calls `apply_row` for each; override it to process the batch at once.
        """
        for view, i in zip(views, index, strict=True):
            logits[i] = self.apply_row(view, logits[i])
        return logits
