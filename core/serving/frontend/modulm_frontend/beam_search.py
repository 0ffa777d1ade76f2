"""Beam search, as `transformers` defines it: same beams, same scores, same moment to stop.

A step takes the best continuations of all beams together. Enough of them are looked at that
`beam_width` beams can go on even if the best ones all end; only an end among the first
`beam_width` counts as an answer. Answers compete by their log probability over their length to
the power of `length_penalty`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from attrs import evolve, field, frozen

from modulm.contracts.outputs import BeamSearchSequence, Position
from modulm.contracts.sampling import OutputKind, SamplingParams
from modulm.errors import RequestError

__all__ = ["BeamSearch", "BeamSearchParams"]


#: Beyond this, powers of lengths leave the range of floating-point numbers.
_STEEPEST = 10


def _ids(value: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(value or ())


@frozen
class BeamSearchParams:
    """What is wanted of a search: `beam_width` answers of at most `max_tokens` tokens.

    early_stopping: True ends when there are `beam_width` answers; False when the best running beam
    could not displace one if it ended now; "never" when it could not at any length. temperature
    divides the logits where the engine's logprobs_mode is processed_logprobs and changes nothing
    else, as nothing is drawn. stop_token_ids end a beam as the end of sequence does. logprobs: the
    best tokens to report beside the chosen one.
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
        """How many answers there will be."""
        return self.beam_width

    def with_(self, **changes: Any) -> BeamSearchParams:
        """A copy with some fields changed."""
        return evolve(self, **changes)

    def shown(self) -> SamplingParams:
        """How the answers are turned into text, in the terms of other requests."""
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
    """score: log probability of the answer; tokens: prompt and answer; steps: of the answer."""

    score: float
    tokens: tuple[int, ...]
    steps: tuple[Position, ...] = ()


class BeamSearch:
    """A search in progress: while there are `sequences`, somebody finds the `best` next tokens of
    each and feeds them back. It asks nobody itself, so it serves callers of any kind.

    most: tokens that an answer may have. eos: what ends one. Raises RequestError naming the field.
    """

    def __init__(
        self, prompt: Sequence[int], params: BeamSearchParams, *, most: int, eos: Sequence[int]
    ) -> None:
        _check(params, most)
        self.params = params
        self._most = most
        self._eos = frozenset(eos)
        self._keep = max(2, 1 + len(self._eos)) * params.beam_width
        self.best = max(self._keep, params.logprobs or 0)
        self._length = 0
        self._running = [_Beam(0.0, tuple(prompt))]
        self._answers: list[tuple[float, _Beam]] = []

    @property
    def sequences(self) -> list[tuple[int, ...]]:
        """Prompt and answer so far of every beam that goes on; none when the search is over."""
        return [beam.tokens for beam in self._running]

    def feed(self, found: Sequence[Position]) -> None:
        """The `best` next tokens of each of `sequences`."""
        self._length += 1
        width, length = self.params.beam_width, self._length
        best = self._continuations(found)
        ended = [self._ends(beam) for beam in best]
        for beam, over in list(zip(best, ended, strict=True))[:width]:
            if over:
                self._answers.append((beam.score / length**self.params.length_penalty, beam))
        self._answers = sorted(self._answers, key=lambda answer: -answer[0])[:width]
        running = [beam for beam, over in zip(best, ended, strict=True) if not over][:width]
        self._running = [] if self._decided(running) else running

    def answers(self) -> list[BeamSearchSequence]:
        """The best answers, best first; each ends with its end-of-sequence token if it has one."""
        return [self._sequence(beam) for _, beam in self._answers]

    def _ends(self, beam: _Beam) -> bool:
        return self._length == self._most or beam.tokens[-1] in self._eos

    def _decided(self, running: Sequence[_Beam]) -> bool:
        """Whether no running beam can change the answers any more."""
        params = self.params
        full = len(self._answers) == params.beam_width
        if not running or (full and params.early_stopping is True):
            return True
        patient = params.early_stopping == "never" and params.length_penalty > 0
        reach = self._most if patient else self._length
        return full and running[0].score / reach**params.length_penalty <= self._answers[-1][0]

    def _continuations(self, found: Sequence[Position]) -> list[_Beam]:
        """The best beams that are one token longer."""
        longer = [
            (beam.score + entry.logprob, -place, beam, token, position)
            for place, (beam, position) in enumerate(zip(self._running, found, strict=True))
            for token, entry in position.items()
            if (entry.rank or 0) <= self.best
        ]
        chosen = heapq.nlargest(self._keep, longer, key=lambda item: item[:2])
        return [
            _Beam(score, (*beam.tokens, token), (*beam.steps, self._step(token, position)))
            for score, _, beam, token, position in chosen
        ]

    def _step(self, token: int, position: Position) -> Position:
        """The chosen token and the best ones that are to be reported."""
        shown = self.params.logprobs or 0
        best = {t: entry for t, entry in position.items() if (entry.rank or 0) <= shown}
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


def _check(params: BeamSearchParams, most: int) -> None:
    if params.beam_width < 1:
        raise RequestError(f"beam_width must be at least 1, not {params.beam_width}", "n")
    if most < 1:
        raise RequestError("max_tokens must be at least 1", "max_tokens")
    if not -_STEEPEST <= params.length_penalty <= _STEEPEST:
        raise RequestError(
            f"length_penalty must be a number from -{_STEEPEST} to {_STEEPEST}", "length_penalty"
        )
    if params.early_stopping not in (True, False, "never"):
        raise RequestError('early_stopping must be true, false or "never"', "early_stopping")
