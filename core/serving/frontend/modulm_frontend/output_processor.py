"""Detokenizes what the engine gives: from step events to the outputs of many requests.

A `RequestState` gathers what the n sequences of a request gave. It is fed once per step and read
when its caller gets round to it, so a slow caller finds several deltas merged into one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    SpecDecodeMetrics,
    Statistics,
)
from modulm.contracts.request_listener import RequestListener
from modulm.contracts.requests import Finish, StepEvents
from modulm.contracts.sampling import OutputKind, PoolingParams, SamplingParams
from modulm.errors import RequestError
from modulm.text.detokenizer import Detokenizer
from modulm.text.stops import StopScanner
from modulm_frontend.origin import request_origin

if TYPE_CHECKING:
    from modulm.text.tokenizer import Tokenizer

__all__ = ["Choice", "OutputProcessor", "RequestState", "position"]

log = logging.getLogger("modulm.frontend")

#: Tokens at the prompt's end that a detokenizer may look at.
_CONTEXT = 16


class Choice:
    """One sequence's tokens becoming text. What a later stop string would swallow is held back."""

    def __init__(
        self, index: int, prompt: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[Position] | None = None if params.logprobs is None else []
        self.cumulative: float | None = None if params.logprobs is None else 0.0
        self.reason: str | None = None
        self.stop: int | str | None = None
        self.drafted: SpecDecodeMetrics | None = None
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
        # What `delta` has handed out: pieces, tokens, and whether the end was told.
        self._given = (0, 0, False)

    @property
    def text(self) -> str:
        """All text that is certain."""
        if len(self._pieces) > 1 and self._params.output_kind is not OutputKind.DELTA:
            self._pieces = ["".join(self._pieces)]
        return "".join(self._pieces)

    def add(self, token: int, logprobs: RowLogprobs | None, finish: Finish | None) -> bool:
        """Take one token, and its end if it is the last. Whether a stop string ended it now."""
        self.tokens.append(token)
        if logprobs is not None and self.logprobs is not None:
            self._add_logprobs(token, logprobs)
        by_token = finish is not None and finish.reason == "stop"
        if self._detokenizer is not None and not (
            by_token and not self._params.include_stop_str_in_output
        ):
            self._emit(self._detokenizer.feed((token,)))
        if finish is not None:
            self.finish(finish)
        return finish is None and self.reason is not None

    def finish(self, finish: Finish) -> None:
        """The engine ended the sequence (or it was aborted)."""
        if self.reason is not None:
            return
        if self._detokenizer is not None and finish.reason in ("stop", "length"):
            self._emit(self._detokenizer.finish())
        if self.reason is None:
            self._pieces.append(self._scanner.finish())
            self.reason = finish.reason
            self.stop = finish.stop if finish.error is None else str(finish.error)

    def output(self) -> CompletionOutput:
        """Everything so far."""
        return CompletionOutput(
            self.index, self.text, self.tokens[:], self.cumulative,
            None if self.logprobs is None else self.logprobs[:], self.reason, self.stop,
            spec_decode_metrics=self.drafted,
        )  # fmt: skip

    def delta(self) -> CompletionOutput | None:
        """What came since the last call; None if nothing did."""
        pieces, tokens, _ = given = self._given
        self._given = (len(self._pieces), len(self.tokens), self.reason is not None)
        if self._given == given:
            return None
        return CompletionOutput(
            self.index, "".join(self._pieces[pieces:]), self.tokens[tokens:], self.cumulative,
            None if self.logprobs is None else self.logprobs[tokens:], self.reason, self.stop,
            spec_decode_metrics=self.drafted,
        )  # fmt: skip

    def _emit(self, text: str) -> None:
        if not text:
            return
        # Stop strings count from the token after the last one that min_tokens asks for.
        if len(self.tokens) > self._params.min_tokens:
            text, matched = self._scanner.feed(text)
            if matched is not None:
                self.reason, self.stop = "stop", matched
        if text:
            self._pieces.append(text)

    def _add_logprobs(self, token: int, entry: RowLogprobs) -> None:
        if self.logprobs is None or self.cumulative is None:
            return
        self.logprobs.append(position(entry, self._tokenizer))
        self.cumulative += float(entry.values[0])


def position(entry: RowLogprobs, tokenizer: Tokenizer | None) -> Position:
    """One position as callers see it: the chosen token, then the best ones by rank."""
    found: Position = {}
    ids, values = entry.ids.tolist(), entry.values.tolist()
    ranks = [entry.rank, *range(1, len(ids))]
    for token, value, rank in zip(ids, values, ranks, strict=True):
        if token not in found:
            text = None if tokenizer is None else tokenizer.token_text(token)
            found[token] = Logprob(value, rank, text)
    return found


@define(eq=False)
class RequestState:
    """A request as its caller sees it, over all of its sequences.

    prompt_ids: [tokens] int64. ids: the engine's ids of the sequences; keep: how many of them the
    caller gets, the most probable ones (best_of runs more), without the logprobs if `ranks_only`.
    parent: the request that this one is a part of; no statistics count it then. origin: see
    `modulm_frontend.origin`. drafts: most
    tokens that are drafted in a step. adapter: the one that it names. fresh: tokens since the last
    `take`; streamed, told: whether anything, and its end, was taken. error: set when the request
    never ran; its caller gets it raised.
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
    told: bool = False
    error: Exception | None = None
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
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(self.prompt_ids)
        context = self.prompt_ids[-_CONTEXT:].tolist()
        self.choices = [
            Choice(index, context, params, self.tokenizer) for index in range(len(self.ids))
        ]
        if self.drafts:
            for choice in self.choices:
                choice.drafted = SpecDecodeMetrics(self.drafts)

    def begin_again(self) -> None:
        """Forget what came: another engine runs all of it, from the start."""
        self.cached, self.fresh = None, 0
        self.__attrs_post_init__()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as callers get it: one list, made when it is first asked for."""
        if self._prompt_list is None:
            self._prompt_list = self.prompt_ids.tolist()
        return self._prompt_list

    @property
    def finished(self) -> bool:
        """Whether nothing will be added."""
        if self.error is not None:
            return True
        if isinstance(self.params, PoolingParams):
            return self._pooled is not None
        return all(choice.reason is not None for choice in self.choices)

    def summary(self) -> Finished:
        """What is counted of it once it has ended."""
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
        )

    def started(self, cached: int, time: float) -> None:
        """A sequence got its row; the first one counts."""
        if self.cached is None:
            self.cached = cached
            self.metrics.first_scheduled_time = time

    def asked(self, part: RequestOutput) -> None:
        """A request of a beam search gave a token to each sequence."""
        if part.metrics is not None and self.cached is None:
            self.metrics.first_scheduled_time = part.metrics.first_scheduled_time
            self.metrics.first_token_time = part.metrics.first_token_time
            self.cached = part.num_cached_tokens
        if part.metrics is not None:
            self.metrics.last_token_time = part.metrics.last_token_time

    def verified(self, place: int, drafted: int, accepted: int) -> None:
        """A step verified drafts of a sequence."""
        metrics = self.choices[place].drafted
        if metrics is not None and self.choices[place].reason is None:
            metrics.steps.append((drafted, accepted))

    def add_prompt_logprobs(self, first: int, entries: Sequence[RowLogprobs]) -> None:
        """Entries for the prompt tokens from `first` on; those of all sequences are equal."""
        if self._prompt_logprobs is not None:
            known = len(self._prompt_logprobs)
            for place, entry in zip(range(first, known), entries, strict=False):
                self._prompt_logprobs[place] = position(entry, self.tokenizer)

    def pool(self, values: np.ndarray) -> None:
        """The result of a pooling request."""
        self._pooled = values

    def fail(self, error: Exception) -> None:
        """The request did not run, or no engine is left to run it."""
        if not self.finished:
            self.error = error

    def ended(self, place: int, finish: Finish) -> None:
        """A sequence ended without a token. A wrong request has an error, no output."""
        if isinstance(finish.error, RequestError) or isinstance(self.params, PoolingParams):
            if finish.error is not None:
                self.fail(finish.error)
        else:
            self.choices[place].finish(finish)

    def token(self, place: int, now: float) -> float | None:
        """A sequence has its next token; seconds since its last one, None for its first."""
        before, self._last[place] = self._last[place], now
        self.fresh += 1
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        self.metrics.last_token_time = now
        return None if before is None else now - before

    def take(self) -> RequestOutput | PoolingRequestOutput | None:
        """What the caller should see now; None if there is nothing new. Raises its error."""
        if self.error is not None:
            raise self.error
        if isinstance(self.params, PoolingParams):
            return self._take_pooled()
        kind, finished = self.params.output_kind, self.finished
        if self.told or (kind is OutputKind.FINAL_ONLY and not finished):
            return None
        self.told, self.streamed, self.fresh = finished, True, 0
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
        )

    def _deltas(self) -> list[CompletionOutput]:
        found = [choice.delta() for choice in self.choices]
        return [output for output in found if output is not None]

    def _best(self) -> list[CompletionOutput]:
        """All states, or the `keep` most probable ones of a finished best_of."""
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
        if self._pooled is None or self.told:
            return None
        self.told = True
        return PoolingRequestOutput(
            self.id, PoolingOutput(self._pooled), self.prompt_token_ids, True, self.cached
        )


class OutputProcessor:
    """The requests of one front end that have not ended, by the engine's ids of their sequences."""

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
        """Expect events for a request. Raises RequestError if one of its ids is in use."""
        for identity in state.ids:
            if identity in self._sequences:
                raise RequestError(f"request id {state.id!r} is in use", "request_id")
        for place, identity in enumerate(state.ids):
            self._sequences[identity] = (state, place)

    def remove(self, state: RequestState) -> list[str]:
        """Expect nothing more for it; the ids of sequences that still run."""
        return [
            identity for identity in state.ids if self._sequences.pop(identity, None) is not None
        ]

    def abort(self, state: RequestState) -> list[str]:
        """End a request as aborted; the ids that the engine has to abort."""
        for place, identity in enumerate(state.ids):
            state.ended(place, Finish(identity, "abort"))
        self._finished(state)
        return self.remove(state)

    def fail_all(self, error: Exception) -> list[RequestState]:
        """No engine is left: every request ends with the error."""
        states = list({id(state): state for state, _ in self._sequences.values()}.values())
        for state in states:
            state.fail(error)
        self._sequences.clear()
        return states

    def lost(self, sequences: Sequence[str]) -> list[RequestState]:
        """Nothing more comes of these sequences: the requests that had them."""
        found = (self._sequences.get(identity) for identity in sequences)
        return list({id(entry[0]): entry[0] for entry in found if entry is not None}.values())

    def begin_again(self, state: RequestState) -> None:
        """Expect events for all sequences of a request, of which nobody has seen anything."""
        self.remove(state)
        state.begin_again()
        self.add(state)

    def fail(self, state: RequestState, error: Exception) -> list[str]:
        """No engine goes on with a request: it ends with the error. The ids of its sequences that
        had not ended.
        """
        state.fail(error)
        self._finished(state)
        return self.remove(state)

    def process(self, events: StepEvents) -> tuple[list[RequestState], list[str]]:
        """Take a step's events: the requests with something new, and ids to abort, which a stop
        string ended.
        """
        news: dict[str, RequestState] = {}
        ending = {finish.request: finish for finish in events.finished}
        for start in events.started:
            if start.request in self._sequences:
                self._sequences[start.request][0].started(start.cached, start.time)
        for identity, (first, entries) in events.prompt_logprobs.items():
            if identity in self._sequences:
                self._sequences[identity][0].add_prompt_logprobs(first, entries)
        for identity, verified in events.drafted.items():
            if identity in self._sequences:
                state, place = self._sequences[identity]
                state.verified(place, *verified)
        stopped = self._tokens(events, ending, news)
        for identity, values in events.pooled.items():
            if identity in self._sequences:
                state = self._sequences[identity][0]
                state.pool(values)
                news[state.id] = state
        for identity, finish in ending.items():
            if identity in self._sequences:
                state, place = self._sequences[identity]
                state.ended(place, finish)
                news[state.id] = state
        for identity in (*stopped, *(finish.request for finish in events.finished)):
            self._sequences.pop(identity, None)
        for state in news.values():
            if state.finished:
                self._finished(state)
        if self.statistics is not None and events.stats is not None:
            self.statistics.step(events.stats)
        return list(news.values()), stopped

    def _tokens(
        self, events: StepEvents, ending: dict[str, Finish], news: dict[str, RequestState]
    ) -> list[str]:
        """Hand out the step's tokens; the ids of sequences that a stop string ended."""
        stopped: list[str] = []
        gaps: list[float] = []
        now, logprobs, sequences = events.time, events.logprobs, self._sequences
        run = 0
        following = (*events.requests[1:], "")
        for identity, token, after in zip(events.requests, events.tokens, following, strict=False):
            index, run = run, run + 1 if identity == after else 0
            found = sequences.get(identity)
            if found is None:
                continue
            state, place = found
            finish = None if run else ending.pop(identity, None)
            if state.choices[place].reason is not None:
                continue
            entries = logprobs.get(identity)
            entry = entries[index] if entries else None
            if state.choices[place].add(token, entry, finish):
                stopped.append(identity)
            gap = state.token(place, now)
            if gap is not None:
                gaps.append(gap)
            news[state.id] = state
        if self.statistics is not None:
            self.statistics.gaps(gaps)
        return stopped

    def count(self, state: RequestState) -> None:
        """A request that was filled from others has ended: count it."""
        self._finished(state)

    def _finished(self, state: RequestState) -> None:
        if state.metrics.finished_time is None:
            state.metrics.finished_time = time.monotonic()
            if self.statistics is not None and state.parent is None:
                self.statistics.finished(state.summary())
            if self._listeners and state.parent is None:
                self._tell(state.summary())

    def _tell(self, finished: Finished) -> None:
        """Tell the listeners; one that raises is not told of the next ones."""
        for listener in list(self._listeners):
            try:
                listener.ended(finished)
            except Exception:
                self._listeners.remove(listener)
                log.exception("%r failed and is told of no more requests", listener)
