"""Requests and step events: what a front end asks of the engine, and what the engine answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

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

#: Text, token ids, or a table with `prompt`, `prompt_token_ids` or `prompt_embeds` (and
#: `cache_salt`). `prompt_embeds`: [tokens, hidden], with `--enable-prompt-embeds`; where
#: `prompt_token_ids` and `prompt_is_token_ids` [tokens] are given too, it stands for those tokens
#: that are not.
PromptLike: TypeAlias = "str | Sequence[int] | Mapping[str, object]"

Reason = Literal["stop", "length", "abort", "error"]


def _ids(tokens: np.ndarray | Sequence[int]) -> np.ndarray:
    return np.ascontiguousarray(tokens, dtype=np.int64)


@frozen(eq=False, kw_only=True)
class Request:
    """One sequence to generate (or to pool). A front end makes several for n > 1.

    prompt: [tokens] int64. eos: ids that end it unless `params.ignore_eos`; arrival: seconds of
    the monotonic clock; salt: prefixes are only shared among requests of equal salt; seed: of
    this sequence's random stream; bad_words: the token sequences of `params.bad_words`.
    adapter_from: the first token that the adapter applies to. positions: [axes, tokens]
    int64 of the prompt where a model counts positions along several axes; later tokens go on from
    `position_offset` + their place, the same on each axis. media: in the order of their places.
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

    @property
    def prompt_len(self) -> int:
        """Tokens in the prompt."""
        return len(self.prompt)

    @property
    def crossed(self) -> tuple[int, ...]:
        """What its encoder gives to layers of cross attention, run by run (see `crossed_runs`)."""
        return tuple(sum(item.length for item in run) for run in crossed_runs(self.media))

    @property
    def text(self) -> np.ndarray | None:
        """[n] int64, the prompt's tokens but for those that stand for embeddings of the caller's;
        None if all are text.
        """
        if all(item.encoded for item in self.media):
            return None
        is_text = np.ones(len(self.prompt), dtype=bool)
        for item in self.media:
            is_text[item.start : item.start + item.length] = item.encoded
        return self.prompt[is_text]

    @property
    def constraint(self) -> StructuredOutputs | None:
        """What its text is held to."""
        return self.params.structured_outputs if isinstance(self.params, SamplingParams) else None

    @property
    def reads_prefix(self) -> bool:
        """Whether blocks of other requests may stand in for computing: not if every position's
        output is wanted.
        """
        params = self.params
        return isinstance(params, SamplingParams) and params.prompt_logprobs is None

    def limit(self, max_model_len: int) -> int:
        """The number of tokens, prompt included, at which the sequence ends."""
        if isinstance(self.params, PoolingParams):
            return self.prompt_len + 1
        if self.params.max_tokens is None:
            return max_model_len
        return min(self.prompt_len + self.params.max_tokens, max_model_len)

    @property
    def least(self) -> int:
        """The number of tokens, prompt included, below which stop ids do not end it.

        The sampler gives none below `min_tokens` anyway, unless a grammar is complete and leaves
        nothing else to say.
        """
        if isinstance(self.params, PoolingParams) or self.params.structured_outputs is not None:
            return self.prompt_len
        return self.prompt_len + self.params.min_tokens

    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end it. Nothing can follow a complete grammar, even with ignore_eos."""
        if isinstance(self.params, PoolingParams):
            return ()
        return self.params.stop_token_ids + self._eos

    def stop_reason(self, token: int) -> int | None:
        """What the caller is told of the token that ended it: None for end of sequence."""
        return None if token in self._eos else token

    @property
    def _eos(self) -> tuple[int, ...]:
        params = self.params
        ignored = isinstance(params, SamplingParams) and params.ignore_eos
        held = isinstance(params, SamplingParams) and params.structured_outputs is not None
        return () if ignored and not held else self.eos


class Start(NamedTuple):
    """A request got its row. `cached`: prompt tokens that a prefix hit saved; `time`: monotonic."""

    request: str
    cached: int
    time: float


class Finish(NamedTuple):
    """A request has ended. `error` says why for reason "error"; the front end may raise it."""

    request: str
    reason: Reason
    stop: int | None = None
    error: Exception | None = None


class StepStats(NamedTuple):
    """One step in numbers. Counts are of this step, except for the gauges running, waiting, usage.

    usage: share of the cache's blocks in use. computed: tokens that went through the model.
    drafted, accepted: tokens that were verified, and those of them that were right; drafts: rows
    that had such tokens; accepted_at: of these, how many had the first, second ... token right.
    queried, hit: tokens looked up and found in the prefix cache by requests that joined.
    plan_seconds, run_seconds: host time of planning, time in the executor. routed: how many times
    tokens chose each expert, where that is counted.
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


@frozen(eq=False)
class StepEvents:
    """What a step means to front ends: one value per step, in row order.

    requests[i] sampled tokens[i]; several tokens of a request follow one another, and logprobs has
    an entry for each. prompt_logprobs: request -> (index of the prompt token that the
    first entry is about, entries). drafted: request -> how many of its drafted tokens were
    verified, and how many of these were right.
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
