"""Outputs that `LLM` returns and `AsyncLLM` streams, with vLLM's field names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, frozen

if TYPE_CHECKING:
    from modulm.contracts.sampling import PoolingParams, SamplingParams

__all__ = [
    "API",
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
    "SpecDecodeMetrics",
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


class SpecDecodeMetrics(Protocol):
    """Draft acceptance of one output.

    num_spec_tokens: maximum drafts per step. steps: (drafted, accepted) of each step that verified
    drafts.
    """

    num_spec_tokens: int
    steps: list[tuple[int, int]]

    def to_dict(self, detailed: bool = False) -> Any:
        """Return the statistics with vLLM's names. detailed: include those of each step."""


@define
class CompletionOutput:
    """One of the n outputs. In a delta stream, text, token_ids and logprobs hold only new tokens.

    finish_reason: None while running, then "stop", "length", "repetition", "abort" or "error".
    stop_reason: the stop string or token id that ended it, None for end of sequence;
    "repetition_detected"; for "error", the message.
    cumulative_logprob: of all tokens so far, if logprobs were requested. reasoning: the reasoning
    before the text, if a parser separates it (`LLM.chat`). spec_decode_metrics: of all steps so
    far; None without speculative decoding. weight_versions: of a finished output, (version of the
    weights, first token, end) of each range of its tokens that one version generated. arrays: what
    step parts computed for the tokens, by name, such as the "samples" of a model that speaks; only
    those of new tokens in a delta stream. sampling_mask: for each token, the ids that it was drawn
    from (`--return-sampling-mask`).
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
    arrays: Mapping[str, Any] | None = None
    weight_versions: Sequence[tuple[int, int, int]] = ()
    sampling_mask: list[list[int]] | None = None

    def finished(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None


@define
class RequestOutput:
    """The output of a request so far.

    prompt: None if it was given as token ids. prompt_logprobs: one entry per prompt token, None for
    the first. num_cached_tokens: prompt tokens found in the prefix cache; None until the request
    has run. kv_transfer_params: where another engine finds the prompt's KV cache, if requested.
    retained: (tokens held, seconds) for each prefix of the prompt that the request asked to hold.
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
    retained: Sequence[Sequence[float]] = ()


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


@frozen
class Finished:
    """A request that has ended.

    prompt: its length in tokens. generated, reasons: number of tokens and finish reason of each
    output. origin: where the request came from, as set by its front end. cached: prompt tokens
    found in a cache, None if it never ran. loaded: those of them that a KV connector loaded.
    preemptions: of all its sequences.
    """

    times: RequestMetrics
    params: SamplingParams | PoolingParams
    prompt: int
    generated: Sequence[int]
    reasons: Sequence[str]
    adapter: str | None = None
    id: str = ""
    origin: object | None = None
    cached: int | None = None
    preemptions: int = 0
    loaded: int = 0
