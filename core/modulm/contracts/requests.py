"""Requests from front ends to the engine, and the events that the engine returns."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from attrs import field, frozen

from modulm.contracts.media import crossed_runs
from modulm.contracts.sampling import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from modulm.contracts.executor import RowLogprobs
    from modulm.contracts.media import MediaItem
    from modulm.contracts.sampling import StructuredOutputs

__all__ = ["API", "Finish", "PromptLike", "Reason", "Request", "Start", "StepEvents", "StepStats"]

API = 1

#: Text, token ids, or a mapping with `prompt`, `prompt_token_ids` or `prompt_embeds` (and
#: `cache_salt`). `prompt_embeds`: [tokens, hidden], needs `--enable-prompt-embeds`; together with
#: `prompt_token_ids` and `prompt_is_token_ids` [tokens] it replaces the tokens marked False.
PromptLike: TypeAlias = "str | Sequence[int] | Mapping[str, object]"

Reason = Literal["stop", "length", "abort", "error", "repetition"]


def _ids(tokens: np.ndarray | Sequence[int]) -> np.ndarray:
    return np.ascontiguousarray(tokens, dtype=np.int64)


@frozen(eq=False, kw_only=True)
class Request:
    """One sequence to generate or to pool. For n > 1 a front end creates several.

    prompt: [tokens] int64. eos: ids that end the sequence unless `params.ignore_eos`. arrival:
    seconds of the monotonic clock. salt: only requests with equal salts share prefixes. seed: of
    this sequence's random stream. bad_words: token sequences of `params.bad_words`. adapter_from:
    first token that the adapter applies to. positions: [axes, tokens] int64 of the prompt, for
    models with several position axes; a later token's position is its index + `position_offset`, on
    each axis. media: in prompt order. tenant: whose request it is; empty if the front end knows
    none. weight: of the tenant's share of the engine.
    """

    id: str
    prompt: np.ndarray = field(converter=_ids)
    params: SamplingParams | PoolingParams
    eos: tuple[int, ...] = ()
    arrival: float = 0.0
    priority: int = 0
    salt: str | None = None
    adapter: str | None = None
    media: tuple[MediaItem, ...] = ()
    positions: np.ndarray | None = None
    position_offset: int = 0
    seed: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    adapter_from: int = 0
    tenant: str = ""
    weight: float = 1.0

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt)

    @property
    def crossed(self) -> tuple[int, ...]:
        """Number of encoder outputs for cross attention, by run (see `crossed_runs`)."""
        return tuple(sum(item.length for item in run) for run in crossed_runs(self.media))

    @property
    def text(self) -> np.ndarray | None:
        """The prompt without tokens given as embeddings: [n] int64; None if there are none."""
        if all(item.encoded for item in self.media):
            return None
        is_text = np.ones(len(self.prompt), dtype=bool)
        for item in self.media:
            is_text[item.start : item.start + item.length] = item.encoded
        return self.prompt[is_text]

    @property
    def constraint(self) -> StructuredOutputs | None:
        """The structured output constraint, or None."""
        return self.params.structured_outputs if isinstance(self.params, SamplingParams) else None

    @property
    def reads_prefix(self) -> bool:
        """Whether the prefix cache may be used: not if all prompt positions need outputs."""
        params = self.params
        return isinstance(params, SamplingParams) and params.prompt_logprobs is None

    def limit(self, max_model_len: int) -> int:
        """Return the maximum number of tokens, including the prompt."""
        if isinstance(self.params, PoolingParams):
            return self.prompt_len + 1
        if self.params.max_tokens is None:
            return max_model_len
        return min(self.prompt_len + self.params.max_tokens, max_model_len)

    @property
    def least(self) -> int:
        """The minimum number of tokens, including the prompt, before stop ids end the sequence.

        The sampler suppresses stop ids below `min_tokens`, unless a complete grammar allows nothing
        else.
        """
        if isinstance(self.params, PoolingParams) or self.params.structured_outputs is not None:
            return self.prompt_len
        return self.prompt_len + self.params.min_tokens

    def stop_ids(self) -> tuple[int, ...]:
        """Return the tokens that end it. With a grammar these include eos despite ignore_eos."""
        if isinstance(self.params, PoolingParams):
            return ()
        return self.params.stop_token_ids + self._eos

    def stop_reason(self, token: int) -> int | None:
        """Return the public stop_reason for the final token: None for end of sequence."""
        return None if token in self._eos else token

    @property
    def _eos(self) -> tuple[int, ...]:
        params = self.params
        ignored = isinstance(params, SamplingParams) and params.ignore_eos
        constrained = isinstance(params, SamplingParams) and params.structured_outputs is not None
        return () if ignored and not constrained else self.eos


class Start(NamedTuple):
    """A request was admitted. cached: prompt tokens from the prefix cache. time: monotonic."""

    request: str
    cached: int
    time: float


class Finish(NamedTuple):
    """A request has ended. error: for the reason "error"; the front end may raise it.
    preemptions: how often it was preempted.
    """

    request: str
    reason: Reason
    stop: int | None = None
    error: Exception | None = None
    preemptions: int = 0


class StepStats(NamedTuple):
    """Statistics of one step. Counts are for this step; running, waiting and usage are gauges.

    usage: fraction of cache blocks in use. computed: tokens that went through the model. drafted,
    accepted: tokens that were verified and accepted. drafts: rows with drafted tokens. accepted_at:
    number of rows whose first, second, ... draft was accepted. queried, hit: prompt tokens looked
    up and found in the prefix cache by admitted requests. plan_seconds: host time of planning.
    run_seconds: time in the executor. routed: tokens routed to each expert, if counted. deferred:
    waiting requests that a step part defers, or that wait for a prefix that is being computed.
    """

    step: int
    running: int
    waiting: int
    usage: float
    computed: int = 0
    generated: int = 0
    preempted: int = 0
    queried: int = 0
    hit: int = 0
    plan_seconds: float = 0.0
    run_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    drafts: int = 0
    accepted_at: tuple[int, ...] = ()
    routed: tuple[int, ...] = ()
    deferred: int = 0


@frozen(eq=False)
class StepEvents:
    """The events of one step for front ends, in row order.

    requests[i] sampled tokens[i]; a request's tokens are consecutive, with one entry of logprobs
    each. prompt_logprobs: request -> (index of the first entry's prompt token, entries). drafted:
    request -> (verified drafts, accepted drafts). transfer_params, retained: request ->
    `RequestOutput.kv_transfer_params`, `RequestOutput.retained`. loaded: request -> tokens that a
    KV connector loaded. counts: metric -> what to add: a number, or a histogram's values. A label
    follows a metric's name after "/".
    arrays: request -> arrays by name that step parts computed for its new tokens, one after the
    other along the first axis (`CompletionOutput.arrays`).
    """

    time: float = field(factory=time.monotonic)
    requests: list[str] = field(factory=list)
    tokens: list[int] = field(factory=list)
    started: list[Start] = field(factory=list)
    finished: list[Finish] = field(factory=list)
    logprobs: dict[str, tuple[RowLogprobs, ...]] = field(factory=dict)
    prompt_logprobs: dict[str, tuple[int, tuple[RowLogprobs, ...]]] = field(factory=dict)
    pooled: dict[str, np.ndarray] = field(factory=dict)
    stats: StepStats | None = None
    drafted: dict[str, tuple[int, int]] = field(factory=dict)
    transfer_params: dict[str, Mapping[str, Any]] = field(factory=dict)
    retained: dict[str, Sequence[Sequence[float]]] = field(factory=dict)
    counts: dict[str, Any] = field(factory=dict)
    arrays: dict[str, Mapping[str, np.ndarray]] = field(factory=dict)
    loaded: dict[str, int] = field(factory=dict)
