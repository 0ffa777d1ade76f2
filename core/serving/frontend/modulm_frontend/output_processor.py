"""Detokenizes step events into the outputs of many requests.

A `RequestState` collects the tokens of a request's n sequences. It is updated once per step and
read whenever its caller is ready, so a slow caller gets several deltas merged into one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field

from modulm.contracts.executor import RowLogprobs
from modulm.contracts.outputs import (
    CompletionOutput,
    Finished,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    Position,
    RequestMetrics,
    RequestOutput,
)
from modulm.contracts.request_listener import RequestListener
from modulm.contracts.requests import Finish, StepEvents
from modulm.contracts.sampling import OutputKind, PoolingParams, SamplingParams
from modulm.errors import RequestError
from modulm_frontend.draft_metrics import DraftMetrics
from modulm_frontend.origin import request_origin
from modulm_frontend.repetition import repetition_of
from modulm_frontend.statistics import Statistics
from modulm_frontend.stops import StopScanner
from modulm_tokenizers.detokenizer import Detokenizer

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["Choice", "OutputProcessor", "RequestState", "position"]

log = logging.getLogger("modulm.frontend")

#: Reasons for which the text is complete.
_COMPLETE = ("stop", "length", "repetition")
#: Prompt tokens that a detokenizer gets as context.
_CONTEXT = 16


class Choice:
    """One sequence and its text. Text that may belong to a stop string is held back."""

    def __init__(
        self, index: int, prompt: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[Position] | None = None if params.logprobs is None else []
        self.cumulative: float | None = None if params.logprobs is None else 0.0
        self.reason: str | None = None
        self.stop: int | str | None = None
        self.drafted: DraftMetrics | None = None
        #: For each token, the ids that it was drawn from, if they are returned.
        self.masks: list[list[int]] | None = None
        self._arrays: list[Mapping[str, np.ndarray]] = []
        #: (version of the weights, number of tokens before it).
        self._versions: list[tuple[int, int]] = []
        self._pieces: list[str] = []
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._scanner = StopScanner(params.stop, params.include_stop_str_in_output)
        self._repetition = repetition_of(params)
        # What `delta` has returned: counts of pieces and tokens, and whether it returned the end.
        self._handed_out = (0, 0, False)

    @property
    def text(self) -> str:
        """The text so far, without a possible stop string at its end."""
        if len(self._pieces) > 1 and self._params.output_kind is not OutputKind.DELTA:
            self._pieces = ["".join(self._pieces)]
        return "".join(self._pieces)

    def add(self, token: int, logprobs: RowLogprobs | None, finish: Finish | None) -> bool:
        """Add a token and, with the last one, the finish. True if a stop string or a repetition
        ended it now.
        """
        self.tokens.append(token)
        if logprobs is not None and self.masks is not None:
            self.masks.append(_support(logprobs))
            if self._params.logprobs != -1:
                logprobs = _first(logprobs, self._params.logprobs or 0)
        if logprobs is not None and self.logprobs is not None:
            self._add_logprobs(token, logprobs)
        by_token = finish is not None and finish.reason == "stop"
        if self._detokenizer is not None and not (
            by_token and not self._params.include_stop_str_in_output
        ):
            self._emit(self._detokenizer.feed((token,)))
        if finish is not None:
            self.finish(finish)
        elif self._repetition is not None and self._repetition.ends(self.tokens):
            self.finish(Finish("", "repetition"))
        return finish is None and self.reason is not None

    def add_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Add what step parts computed for the tokens of this step."""
        if self.reason is None:
            self._arrays.append(arrays)

    def drop_token(self) -> None:
        """Drop what step parts computed for a token after a stop string, of the same step."""
        if self._arrays:
            self._arrays[-1] = {name: array[:-1] for name, array in self._arrays[-1].items()}

    def finish(self, finish: Finish) -> None:
        """End the sequence, as finished by the engine or aborted."""
        if self.reason is not None:
            return
        if self._detokenizer is not None and finish.reason in _COMPLETE:
            self._emit(self._detokenizer.finish())
        if self.reason is None:
            self._pieces.append(self._scanner.finish())
            self.reason = finish.reason
            self.stop = finish.stop if finish.error is None else str(finish.error)
            if finish.reason == "repetition":
                self.stop = "repetition_detected"

    def output(self) -> CompletionOutput:
        """The output so far, cumulative."""
        return CompletionOutput(
            self.index, self.text, self.tokens[:], self.cumulative,
            None if self.logprobs is None else self.logprobs[:], self.reason, self.stop,
            spec_decode_metrics=self.drafted, weight_versions=self._version_ranges(),
            arrays=_joined(self._arrays),
            sampling_mask=None if self.masks is None else self.masks[:],
        )  # fmt: skip

    def delta(self) -> CompletionOutput | None:
        """The output since the last call; None if nothing is new."""
        pieces, tokens, _ = before = self._handed_out
        self._handed_out = (len(self._pieces), len(self.tokens), self.reason is not None)
        if self._handed_out == before:
            return None
        arrays, self._arrays = _joined(self._arrays), []
        return CompletionOutput(
            self.index, "".join(self._pieces[pieces:]), self.tokens[tokens:], self.cumulative,
            None if self.logprobs is None else self.logprobs[tokens:], self.reason, self.stop,
            spec_decode_metrics=self.drafted, weight_versions=self._version_ranges(),
            arrays=arrays, sampling_mask=None if self.masks is None else self.masks[tokens:],
        )  # fmt: skip

    def note_weights(self, version: int) -> None:
        """Record the version of the weights that generate the tokens from now on."""
        if self._versions and self._versions[-1][1] == len(self.tokens):
            self._versions.pop()
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, len(self.tokens)))

    def _version_ranges(self) -> list[tuple[int, int, int]]:
        """`CompletionOutput.weight_versions`."""
        if self.reason is None or not self.tokens:
            return []
        ends = [*(first for _, first in self._versions[1:]), len(self.tokens)]
        ranges = zip(self._versions, ends, strict=True) if self._versions else ()
        return [(version, first, end) for (version, first), end in ranges if first < end]

    def _emit(self, text: str) -> None:
        if not text:
            return
        # Stop strings are matched only after min_tokens tokens.
        if len(self.tokens) > self._params.min_tokens:
            text, matched = self._scanner.feed(text)
            if matched is not None:
                self.reason, self.stop = "stop", matched
        if text:
            self._pieces.append(text)

    def _add_logprobs(self, token: int, entry: RowLogprobs) -> None:
        if self.logprobs is None or self.cumulative is None:
            return
        ranked = not self._params.logprob_token_ids
        self.logprobs.append(position(entry, self._tokenizer, ranked=ranked))
        self.cumulative += float(entry.values[0])


def _support(entry: RowLogprobs) -> list[int]:
    """The tokens that top-k, top-p and min-p left, from log probabilities after these filters; the
    sampled token, which comes first, is one of the best.
    """
    ids: list[int] = entry.ids[1:][np.isfinite(entry.values[1:])].tolist()
    return ids


def _first(entry: RowLogprobs, count: int) -> RowLogprobs:
    """The sampled token and the `count` best ones."""
    return RowLogprobs(entry.ids[: count + 1], entry.values[: count + 1], entry.rank)


def _joined(arrays: Sequence[Mapping[str, np.ndarray]]) -> Mapping[str, np.ndarray] | None:
    """Arrays of several steps, joined along the first axis by name; None without any."""
    if len(arrays) < 2:
        return arrays[0] if arrays else None
    return {name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]}


def position(entry: RowLogprobs, tokenizer: Tokenizer | None, *, ranked: bool = True) -> Position:
    """The logprobs of one position: the chosen token first, then the best ones by rank, or those
    that the request names, which have no rank (`ranked=False`).
    """
    entries: Position = {}
    ids, values = entry.ids.tolist(), entry.values.tolist()
    others = range(1, len(ids)) if ranked else [None] * (len(ids) - 1)
    ranks: list[int | None] = [entry.rank, *others]
    for token, value, rank in zip(ids, values, ranks, strict=True):
        if token not in entries:
            text = None if tokenizer is None else tokenizer.token_text(token)
            entries[token] = Logprob(value, rank, text)
    return entries


@define(eq=False)
class RequestState:
    """A request as its caller sees it, with all of its sequences.

    prompt_ids: [tokens] int64. ids: the engine's ids of the sequences. keep: how many sequences
    are returned, the most probable ones (best_of runs more). ranks_only: logprobs were requested
    only to rank the sequences and are not returned. parent: the request that this one is a part
    of; statistics then do not count it. origin: see `modulm_frontend.origin`. adapter: the LoRA
    adapter's name. drafts: maximum number of draft tokens per step. fresh: tokens since the last
    `take`. streamed: whether anything was taken; end_taken: whether the end was. error: why the
    request could not run; `take` raises it. interval: `SamplingParams.stream_interval`, or 1.
    masked: outputs have `sampling_mask`.
    """

    id: str
    prompt: str | None
    prompt_ids: np.ndarray
    params: SamplingParams | PoolingParams
    tokenizer: Tokenizer | None
    arrival: float
    ids: tuple[str, ...] = ()
    keep: int = 1
    ranks_only: bool = False
    parent: RequestState | None = None
    adapter: str | None = None
    origin: object | None = field(factory=request_origin.get)
    choices: list[Choice] = field(factory=list)
    metrics: RequestMetrics = field(init=False)
    cached: int | None = None
    drafts: int = 0
    fresh: int = 0
    streamed: bool = False
    end_taken: bool = False
    transfer_params: Mapping[str, Any] | None = None
    retained: Sequence[Sequence[float]] = ()
    preemptions: int = 0
    loaded: int = 0
    error: Exception | None = None
    interval: int = field(init=False, default=1)
    masked: bool = False
    _weight_version: int | None = field(init=False, default=None)
    _prompt_logprobs: list[Position | None] | None = None
    _pooled: np.ndarray | None = None
    _prompt_list: list[int] | None = None
    _last: list[float | None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.metrics = RequestMetrics(self.arrival)
        self._last = [None] * len(self.ids)
        params = self.params
        if isinstance(params, PoolingParams):
            return
        self.interval = params.stream_interval or 1
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(self.prompt_ids)
        context = self.prompt_ids[-_CONTEXT:].tolist()
        self.choices = [
            Choice(index, context, params, self.tokenizer) for index in range(len(self.ids))
        ]
        if self.masked:
            for choice in self.choices:
                choice.masks = []
        if self.drafts:
            for choice in self.choices:
                choice.drafted = DraftMetrics(self.drafts)
        if self._weight_version is not None:
            self.note_weights(self._weight_version)

    def mask(self) -> None:
        """Return the tokens that each token was drawn from."""
        self.masked = True
        for choice in self.choices:
            choice.masks = []

    def note_weights(self, version: int) -> None:
        """Record the version of the weights that generate the request's tokens from now on."""
        self._weight_version = version
        for choice in self.choices:
            choice.note_weights(version)

    def restart(self) -> None:
        """Discard all results, since another engine runs the request from the start."""
        self.cached, self.fresh, self.preemptions, self.loaded = None, 0, 0, 0
        self.__attrs_post_init__()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids as a list, created on first use."""
        if self._prompt_list is None:
            self._prompt_list = self.prompt_ids.tolist()
        return self._prompt_list

    @property
    def finished(self) -> bool:
        """Whether the request is complete or has failed."""
        if self.error is not None:
            return True
        if isinstance(self.params, PoolingParams):
            return self._pooled is not None
        return all(choice.reason is not None for choice in self.choices)

    def summary(self) -> Finished:
        """Summarize the finished request for statistics and listeners."""
        reasons = [choice.reason or "abort" for choice in self.choices] or ["stop"]
        return Finished(
            times=self.metrics,
            params=self.params,
            prompt=len(self.prompt_ids),
            generated=[len(choice.tokens) for choice in self.choices],
            reasons=reasons if self.error is None else ["error"],
            adapter=self.adapter,
            id=self.id,
            origin=self.origin,
            cached=self.cached,
            preemptions=self.preemptions,
            loaded=min(self.loaded, self.cached or 0),
        )

    def started(self, cached: int, time: float) -> None:
        """Record that a sequence got its row. Only the first of a request counts."""
        if self.cached is None:
            self.cached = cached
            self.metrics.first_scheduled_time = time

    def record_step(self, part: RequestOutput) -> None:
        """Record a step of a beam search, in which every beam got a token."""
        if part.metrics is not None and self.cached is None:
            self.metrics.first_scheduled_time = part.metrics.first_scheduled_time
            self.metrics.first_token_time = part.metrics.first_token_time
            self.cached = part.num_cached_tokens
        if part.metrics is not None:
            self.metrics.last_token_time = part.metrics.last_token_time

    def record_drafts(self, index: int, drafted: int, accepted: int) -> None:
        """Record how many drafts of a sequence a step accepted."""
        metrics = self.choices[index].drafted
        if metrics is not None and self.choices[index].reason is None:
            metrics.steps.append((drafted, accepted))

    def add_prompt_logprobs(self, first: int, entries: Sequence[RowLogprobs]) -> None:
        """Add logprobs of the prompt tokens from `first` on; all sequences share them."""
        if self._prompt_logprobs is not None:
            known = len(self._prompt_logprobs)
            for index, entry in zip(range(first, known), entries, strict=False):
                self._prompt_logprobs[index] = position(entry, self.tokenizer)

    def pool(self, values: np.ndarray) -> None:
        """Store the result of a pooling request."""
        self._pooled = values

    def fail(self, error: Exception) -> None:
        """End the request with an error that `take` raises. A finished request is unchanged."""
        if not self.finished:
            self.error = error

    def end_sequence(self, index: int, finish: Finish) -> None:
        """End a sequence without a token. An invalid request gets an error instead of an output."""
        if isinstance(finish.error, RequestError) or isinstance(self.params, PoolingParams):
            if finish.error is not None:
                self.fail(finish.error)
        else:
            self.choices[index].finish(finish)

    def record_token(self, index: int, now: float) -> float | None:
        """Record the time of a token; returns the seconds since the previous one, if any."""
        before, self._last[index] = self._last[index], now
        self.fresh += 1
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        self.metrics.last_token_time = now
        return None if before is None else now - before

    def take(self) -> RequestOutput | PoolingRequestOutput | None:
        """Take the next output, None if nothing is new. Raises the request's error."""
        if self.error is not None:
            raise self.error
        if isinstance(self.params, PoolingParams):
            return self._take_pooled()
        kind, finished = self.params.output_kind, self.finished
        if self.end_taken or (kind is OutputKind.FINAL_ONLY and not finished):
            return None
        self.end_taken, self.streamed, self.fresh = finished, True, 0
        outputs = self._deltas() if kind is OutputKind.DELTA else self._best()
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=self.metrics,
            num_cached_tokens=self.cached,
            kv_transfer_params=self.transfer_params,
            retained=self.retained,
        )

    def _deltas(self) -> list[CompletionOutput]:
        deltas = [choice.delta() for choice in self.choices]
        return [output for output in deltas if output is not None]

    def _best(self) -> list[CompletionOutput]:
        """The outputs of all sequences, or the `keep` most probable ones of a finished best_of."""
        outputs = [choice.output() for choice in self.choices]
        if self.keep >= len(outputs):
            return outputs
        outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
        for index, output in enumerate(outputs):
            output.index = index
            if self.ranks_only:
                output.logprobs = None
        return outputs[: self.keep]

    def _take_pooled(self) -> PoolingRequestOutput | None:
        if self._pooled is None or self.end_taken:
            return None
        self.end_taken = True
        return PoolingRequestOutput(
            self.id, PoolingOutput(self._pooled), self.prompt_token_ids, True, self.cached
        )


class OutputProcessor:
    """The unfinished requests of one front end, by the engine's ids of their sequences."""

    def __init__(
        self,
        statistics: Statistics | None = None,
        listeners: Sequence[RequestListener] = (),
    ) -> None:
        self._sequences: dict[str, tuple[RequestState, int]] = {}
        self.statistics = statistics
        self._listeners = list(listeners)

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, state: RequestState) -> None:
        """Register a request for events. Raises RequestError if one of its ids is in use."""
        for identity in state.ids:
            if identity in self._sequences:
                raise RequestError(f"request id {state.id!r} is in use", "request_id")
        for index, identity in enumerate(state.ids):
            self._sequences[identity] = (state, index)

    def remove(self, state: RequestState) -> list[str]:
        """Unregister a request; returns the ids of its sequences that still run."""
        return [
            identity for identity in state.ids if self._sequences.pop(identity, None) is not None
        ]

    def abort(self, state: RequestState) -> list[str]:
        """End a request as aborted; returns the ids that the engine must abort."""
        for index, identity in enumerate(state.ids):
            state.end_sequence(index, Finish(identity, "abort"))
        self._finish(state)
        return self.remove(state)

    def fail_all(self, error: Exception) -> list[RequestState]:
        """Fail every request, because no engine is left; returns the requests."""
        states = list({id(state): state for state, _ in self._sequences.values()}.values())
        for state in states:
            state.fail(error)
        self._sequences.clear()
        return states

    def requests_of(self, sequences: Sequence[str]) -> list[RequestState]:
        """The requests that the sequences belong to."""
        entries = (self._sequences.get(identity) for identity in sequences)
        return list({id(entry[0]): entry[0] for entry in entries if entry is not None}.values())

    def restart(self, state: RequestState) -> None:
        """Register a request again, for a run from the start. Nothing of it was taken yet."""
        self.remove(state)
        state.restart()
        self.add(state)

    def fail(self, state: RequestState, error: Exception) -> list[str]:
        """Fail a request; returns the ids of its sequences that still run."""
        state.fail(error)
        self._finish(state)
        return self.remove(state)

    def process(self, events: StepEvents) -> tuple[list[RequestState], list[str]]:
        """Process a step's events; returns the requests with new output, and the ids of sequences
        to abort because a stop string ended them.
        """
        news: dict[str, RequestState] = {}
        ending = {finish.request: finish for finish in events.finished}
        for finish in events.finished:
            if finish.preemptions and finish.request in self._sequences:
                self._sequences[finish.request][0].preemptions += finish.preemptions
        for start in events.started:
            if start.request in self._sequences:
                self._sequences[start.request][0].started(start.cached, start.time)
        for identity, (first, entries) in events.prompt_logprobs.items():
            if identity in self._sequences:
                self._sequences[identity][0].add_prompt_logprobs(first, entries)
        for identity, verified in events.drafted.items():
            if identity in self._sequences:
                state, index = self._sequences[identity]
                state.record_drafts(index, *verified)
        for identity, params in events.transfer_params.items():
            if identity in self._sequences:
                self._sequences[identity][0].transfer_params = params
        for identity, loaded in events.loaded.items():
            if identity in self._sequences:
                self._sequences[identity][0].loaded = loaded
        for identity, retained in events.retained.items():
            if identity in self._sequences:
                self._sequences[identity][0].retained = retained
        for identity, arrays in events.arrays.items():
            if identity in self._sequences:
                state, index = self._sequences[identity]
                state.choices[index].add_arrays(arrays)
        stopped = self._tokens(events, ending, news)
        for identity, values in events.pooled.items():
            if identity in self._sequences:
                state = self._sequences[identity][0]
                state.pool(values)
                news[state.id] = state
        for identity, finish in ending.items():
            if identity in self._sequences:
                state, index = self._sequences[identity]
                state.end_sequence(index, finish)
                news[state.id] = state
        for identity in (*stopped, *(finish.request for finish in events.finished)):
            self._sequences.pop(identity, None)
        for state in news.values():
            if state.finished:
                self._finish(state)
        if self.statistics is not None and events.counts:
            self._count(self.statistics, "parts", events.counts)
        if self.statistics is not None and events.stats is not None:
            self._count(self.statistics, "step", events.stats)
        return list(news.values()), stopped

    def _tokens(
        self, events: StepEvents, ending: dict[str, Finish], news: dict[str, RequestState]
    ) -> list[str]:
        """Add a step's tokens; returns the ids of sequences that a stop string ended."""
        stopped: list[str] = []
        gaps: list[float] = []
        now, logprobs, sequences = events.time, events.logprobs, self._sequences
        run = 0
        following = (*events.requests[1:], "")
        for identity, token, after in zip(events.requests, events.tokens, following, strict=False):
            position_in_run, run = run, run + 1 if identity == after else 0
            entry_of_sequence = sequences.get(identity)
            if entry_of_sequence is None:
                continue
            state, index = entry_of_sequence
            finish = None if run else ending.pop(identity, None)
            if state.choices[index].reason is not None:
                if identity in stopped:
                    state.choices[index].drop_token()
                continue
            entries = logprobs.get(identity)
            entry = entries[position_in_run] if entries else None
            if state.choices[index].add(token, entry, finish):
                stopped.append(identity)
            gap = state.record_token(index, now)
            if gap is not None:
                gaps.append(gap)
            news[state.id] = state
        if self.statistics is not None:
            self._count(self.statistics, "gaps", gaps)
        return stopped

    def count(self, state: RequestState) -> None:
        """Count the end of a request whose output other requests produced, as in beam search."""
        self._finish(state)

    def _finish(self, state: RequestState) -> None:
        if state.metrics.finished_time is None:
            state.metrics.finished_time = time.monotonic()
            if self.statistics is not None and state.parent is None:
                self._count(self.statistics, "finished", state.summary())
            if self._listeners and state.parent is None:
                self._tell(state.summary())

    def _count(self, statistics: Statistics, method: str, value: object) -> None:
        """Call the statistics, which are removed if they raise."""
        try:
            getattr(statistics, method)(value)
        except Exception:
            self.statistics = None
            log.exception("Statistics %r failed and were removed", statistics)

    def _tell(self, finished: Finished) -> None:
        """Notify the listeners. A listener that raises is removed."""
        for listener in list(self._listeners):
            try:
                listener.ended(finished)
            except Exception:
                self._listeners.remove(listener)
                log.exception("Request listener %r failed and was removed", listener)
