"""Beam search with the beams, scores and stopping rule of `transformers`.

A step ranks the best continuations of all beams together. It considers enough candidates to keep
`beam_width` beams running even if the best ones all end. Only an end among the first `beam_width`
candidates becomes an answer. The score of an answer is its log probability divided by its length
to the power of `length_penalty`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from modulm.contracts.outputs import Position
from modulm.contracts.sampling import OutputKind, SamplingParams
from modulm.errors import RequestError

__all__ = ["BeamSearch", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"]


#: Larger exponents of lengths overflow floating-point numbers.
_MAX_LENGTH_PENALTY = 10


def _ids(value: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(value or ())


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
class BeamSearchParams:
    """Parameters of a beam search: `beam_width` answers of at most `max_tokens` tokens.

    early_stopping: True stops at `beam_width` answers; False when the best running beam could not
    replace an answer if it ended now; "never" when it could not at any length. temperature:
    divides the logits if the engine's logprobs_mode is processed_logprobs; nothing is sampled.
    stop_token_ids: end a beam like the end-of-sequence token. logprobs: number of top tokens to
    report with the chosen one.
    """

    beam_width: int
    max_tokens: int | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = field(default=False, kw_only=True)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_ids, kw_only=True)
    logprobs: int | None = field(default=None, kw_only=True)
    skip_special_tokens: bool = field(default=True, kw_only=True)
    spaces_between_special_tokens: bool = field(default=True, kw_only=True)

    @property
    def n(self) -> int:
        """The number of answers."""
        return self.beam_width

    def with_(self, **changes: Any) -> BeamSearchParams:
        """A copy with some fields changed."""
        return evolve(self, **changes)

    def text_params(self) -> SamplingParams:
        """The sampling parameters by which the answers are detokenized."""
        return SamplingParams(
            n=self.beam_width,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            output_kind=OutputKind.FINAL_ONLY,
        )


@frozen(order=False)
class _Beam:
    """score: log probability of the answer; tokens: prompt and answer; steps: its logprobs."""

    score: float
    tokens: tuple[int, ...]
    steps: tuple[Position, ...] = ()


class BeamSearch:
    """A search in progress. It does no inference itself: while there are `sequences`, the caller
    computes the `num_candidates` best next tokens of each and passes them to `feed`.

    max_tokens: length limit of an answer. eos: tokens that end one. Raises RequestError.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: BeamSearchParams,
        *,
        max_tokens: int,
        eos: Sequence[int],
    ) -> None:
        _check(params, max_tokens)
        self.params = params
        self._max_tokens = max_tokens
        self._eos = frozenset(eos)
        self._keep = max(2, 1 + len(self._eos)) * params.beam_width
        self.num_candidates = max(self._keep, params.logprobs or 0)
        self._length = 0
        self._running = [_Beam(0.0, tuple(prompt))]
        self._answers: list[tuple[float, _Beam]] = []

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """Prompt and answer so far of every running beam; empty when the search is over."""
        return [beam.tokens for beam in self._running]

    def feed(self, positions: Sequence[Position]) -> None:
        """Extend the beams by the `num_candidates` best next tokens of each of `sequences`."""
        self._length += 1
        width, length = self.params.beam_width, self._length
        best = self._continuations(positions)
        ended = [self._ends(beam) for beam in best]
        for beam, over in list(zip(best, ended, strict=True))[:width]:
            if over:
                self._answers.append((beam.score / length**self.params.length_penalty, beam))
        self._answers = sorted(self._answers, key=lambda answer: -answer[0])[:width]
        running = [beam for beam, over in zip(best, ended, strict=True) if not over][:width]
        self._running = [] if self._decided(running) else running

    def answers(self) -> list[BeamSearchSequence]:
        """The answers, best first; each includes its end-of-sequence token if it has one."""
        return [self._sequence(beam) for _, beam in self._answers]

    def _ends(self, beam: _Beam) -> bool:
        return self._length == self._max_tokens or beam.tokens[-1] in self._eos

    def _decided(self, running: Sequence[_Beam]) -> bool:
        """Whether no running beam can still change the answers."""
        params = self.params
        full = len(self._answers) == params.beam_width
        if not running or (full and params.early_stopping is True):
            return True
        patient = params.early_stopping == "never" and params.length_penalty > 0
        reach = self._max_tokens if patient else self._length
        return full and running[0].score / reach**params.length_penalty <= self._answers[-1][0]

    def _continuations(self, positions: Sequence[Position]) -> list[_Beam]:
        """The best beams with one more token."""
        longer = [
            (beam.score + entry.logprob, -index, beam, token, candidates)
            for index, (beam, candidates) in enumerate(zip(self._running, positions, strict=True))
            for token, entry in candidates.items()
            if (entry.rank or 0) <= self.num_candidates
        ]
        chosen = heapq.nlargest(self._keep, longer, key=lambda item: item[:2])
        return [
            _Beam(score, (*beam.tokens, token), (*beam.steps, self._step(token, candidates)))
            for score, _, beam, token, candidates in chosen
        ]

    def _step(self, token: int, position: Position) -> Position:
        """The logprobs of the chosen token and of the top ones to report."""
        reported = self.params.logprobs or 0
        best = {t: entry for t, entry in position.items() if (entry.rank or 0) <= reported}
        return {token: position[token]} | best

    def _sequence(self, beam: _Beam) -> BeamSearchSequence:
        last = beam.tokens[-1]
        return BeamSearchSequence(
            tokens=list(beam.tokens),
            logprobs=list(beam.steps),
            cum_logprob=beam.score,
            finish_reason="stop" if last in self._eos else "length",
            stop_reason=last if last in self.params.stop_token_ids else None,
        )


def _check(params: BeamSearchParams, max_tokens: int) -> None:
    if params.beam_width < 1:
        raise RequestError(f"beam_width must be at least 1, not {params.beam_width}", "n")
    if max_tokens < 1:
        raise RequestError("max_tokens must be at least 1", "max_tokens")
    if not -_MAX_LENGTH_PENALTY <= params.length_penalty <= _MAX_LENGTH_PENALTY:
        raise RequestError(
            f"length_penalty must be a number from -{_MAX_LENGTH_PENALTY} to {_MAX_LENGTH_PENALTY}",
            "length_penalty",
        )
    if params.early_stopping not in (True, False, "never"):
        raise RequestError('early_stopping must be true, false or "never"', "early_stopping")
