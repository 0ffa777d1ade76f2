"""How a request wants its tokens chosen: the values that cross from front ends to the engine.

Field names and meaning are those of vLLM's SamplingParams and PoolingParams, which users bring.
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
    """What a stream of outputs carries each time."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@frozen
class StructuredOutputs:
    """A constraint on the text; exactly one of the first six is set."""

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
    """A number, or None: 0 for False, and None for True."""
    return value if not isinstance(value, bool) else None if value else 0


class _Suggests(type):
    """Of values that people write by hand: a misspelt field is told what it may have meant."""

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
    """How the tokens of one request are chosen and when it ends.

    `logprobs=k` asks for the k best tokens beside the chosen one, -1 for the whole vocabulary.
    `speculative`: how many tokens may be drafted in a step, False (or 0) for none, True (or None)
    for as many as pay; no answer changes.
    Front ends check ranges, with a RequestError that names the field; making the value never fails
    on a range.
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
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: OutputKind = OutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = field(default=None, converter=_ids)
    bad_words: tuple[str, ...] = field(default=(), converter=_strings)
    structured_outputs: StructuredOutputs | None = None
    speculative: int | None = field(default=None, converter=_most_drafts)
    thinking_token_budget: int | None = None
    extra_args: Mapping[str, object] | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken (temperature below 1e-5, as in vLLM)."""
        return self.temperature < 1e-5

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed."""
        return evolve(self, **changes)


@frozen(kw_only=True)
class PoolingParams:
    """What a pooling request wants: `task` is embed, classify, score, token_embed, ...

    truncation_side: where `truncate_prompt_tokens` cuts, "right" (the end, the default) or "left".
    prompt_name: which of the checkpoint's prompts goes before a text; "" for none. pool_from: the
    first token that takes part in pooling. second_text: the token at which the second of two texts
    begins, for models that are told the texts apart by token types.
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
    """One sequence as a logits processor sees it; `output` grows while the row runs."""

    row: int
    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]


class LogitsProcessor(ABC):
    """Changes the logits of some rows (group `modulm.logits_processors`, or a class by path).

    One object serves the engine. It is told which rows come and go, never has to scan the batch,
    and may raise from `admit` or `apply_row`: that ends the row with an error, not the others.
    """

    api: ClassVar[int | tuple[int, int]]
    #: Fields of SamplingParams that it serves: rows that set none of them never reach it, and a
    #: request that sets one is refused where no processor serves it. Without any it is asked
    #: about all rows.
    fields: ClassVar[tuple[str, ...]] = ()

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self.device = device

    @classmethod
    def open(cls, config: Any, vocabulary: int, device: torch.device) -> Self:
        """One for an engine; override it for what depends on `config`, its EngineConfig."""
        return cls(vocabulary, device)

    @classmethod
    def validate(cls, params: SamplingParams) -> None:
        """Raise RequestError for parameters this processor cannot serve; called at the edge."""

    @classmethod
    def validate_for(cls, params: SamplingParams, config: Any) -> None:
        """The same, where `config` matters; None if it is not known."""
        cls.validate(params)

    @property
    def keeps_argmax(self) -> bool:
        """Whether greedy rows may skip this processor."""
        return False

    @abstractmethod
    def admit(self, view: RowView) -> bool:
        """A row starts. Whether this processor wants to see its logits."""

    def release(self, row: int) -> None:
        """A row that was admitted is gone."""

    @abstractmethod
    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        """logits: [vocabulary] fp32 of one row -> the same, changed in place or anew."""

    def apply(
        self, views: Sequence[RowView], logits: torch.Tensor, index: Sequence[int]
    ) -> torch.Tensor:
        """All rows of a step that want it; logits: [rows, vocabulary], `index` their places.

        Override to work on the whole batch at once; the default goes row by row.
        """
        for view, place in zip(views, index, strict=True):
            logits[place] = self.apply_row(view, logits[place])
        return logits
