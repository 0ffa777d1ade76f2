"""Outputs that `LLM` returns and `AsyncLLM` streams, with vLLM's field names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, Protocol, TypedDict

from attrs import define, field, frozen

if TYPE_CHECKING:
    from modulm.contracts.requests import StepStats
    from modulm.contracts.sampling import PoolingParams, SamplingParams

__all__ = [
    "API",
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Finished",
    "Logprob",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SpecDecodeFigures",
    "SpecDecodeMetrics",
    "Statistics",
]

API = 1


@define
class Logprob:
    """One token's log probability, its rank (1 is the most probable), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: Log probabilities of one position by token id: the chosen token first, then the best in order.
Position = dict[int, Logprob]


@define
class RequestMetrics:
    """Timestamps of a request, in seconds of the monotonic clock."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


class SpecDecodeFigures(TypedDict):
    """Speculative decoding statistics of one output, with vLLM's names; the last two by step."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: NotRequired[list[int]]
    per_step_drafted: NotRequired[list[int]]


@define
class SpecDecodeMetrics:
    """Draft acceptance of one output.

    num_spec_tokens: maximum drafts per step. steps: (drafted, accepted) of each step that verified
    drafts.
    """

    num_spec_tokens: int
    steps: list[tuple[int, int]] = field(factory=list)

    def to_dict(self, detailed: bool = False) -> SpecDecodeFigures:
        """Return the statistics. detailed: include those of each step."""
        most = max(self.num_spec_tokens, *(drafted for drafted, _ in self.steps), 0)
        by_length: dict[str, list[int]] = {}
        histogram = [0] * (most + 1)
        for drafted, accepted in self.steps:
            by_length.setdefault(str(drafted), [0] * (drafted + 1))[accepted] += 1
            histogram[accepted] += 1
        count, drafted = len(self.steps), sum(drafted for drafted, _ in self.steps)
        accepted = sum(accepted for _, accepted in self.steps)
        figures: SpecDecodeFigures = {
            "mean_acceptance_length": 1 + accepted / count if count else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "acceptance_histogram_by_draft_length": by_length,
            "num_spec_steps": count,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": self.num_spec_tokens,
        }
        if detailed:
            figures["per_step_accepted"] = [accepted for _, accepted in self.steps]
            figures["per_step_drafted"] = [drafted for drafted, _ in self.steps]
        return figures


@define
class CompletionOutput:
    """One of the n outputs. In a delta stream, text, token_ids and logprobs hold only new tokens.

    finish_reason: None while running, then "stop", "length", "abort" or "error". stop_reason: the
    stop string or token id that ended it, None for end of sequence; for "error", the message.
    cumulative_logprob: of all tokens so far, if logprobs were requested. reasoning: the reasoning
    before the text, if a parser separates it (`LLM.chat`). spec_decode_metrics: of all steps so
    far; None without speculative decoding.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Position] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None

    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None


@define
class RequestOutput:
    """The output of a request so far.

    prompt: None if it was given as token ids. prompt_logprobs: one entry per prompt token, None for
    the first. num_cached_tokens: prompt tokens found in the prefix cache; None until the request
    has run. kv_transfer_params: where another engine finds the prompt's KV cache, if requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Position | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


@define
class PoolingOutput:
    """The raw result of pooling. data: a numpy array, [values] or [tokens, values]."""

    data: Any


@define
class PoolingRequestOutput:
    """The output of a pooling request."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int | None = None


@define
class EmbeddingOutput:
    """An embedding vector."""

    embedding: list[float]


@define
class ClassificationOutput:
    """Class probabilities. probs: one per class."""

    probs: list[float]


@define
class ScoringOutput:
    """The similarity score of a pair of texts."""

    score: float


EmbeddingRequestOutput = PoolingRequestOutput
ClassificationRequestOutput = PoolingRequestOutput
ScoringRequestOutput = PoolingRequestOutput


@define
class BeamSearchSequence:
    """One beam.

    tokens: prompt and generated tokens. cum_logprob: of the generated tokens. stop_reason: the stop
    token that ended it, None for end of sequence.
    """

    tokens: list[int]
    logprobs: list[Position] = field(factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@define
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@frozen
class Finished:
    """A request that has ended.

    prompt: its length in tokens. generated, reasons: number of tokens and finish reason of each
    output. origin: where the request came from, as set by its front end.
    """

    times: RequestMetrics
    params: SamplingParams | PoolingParams
    prompt: int
    generated: Sequence[int]
    reasons: Sequence[str]
    adapter: str | None = None
    id: str = ""
    origin: object | None = None


class Statistics(Protocol):
    """Collects statistics of an engine. Called on the thread that reads the engine's events."""

    def step(self, stats: StepStats) -> None:
        """Record a step."""

    def gaps(self, seconds: Sequence[float]) -> None:
        """Record inter-token latencies of all sequences that got a token in a step."""

    def finished(self, request: Finished) -> None:
        """Record a request that has ended."""
