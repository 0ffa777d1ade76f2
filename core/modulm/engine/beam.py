"""Beam search, as `transformers` defines it: same beams, same scores, same moment to stop.

A step takes the best continuations of all beams together. Enough of them are looked at that
`width` beams can go on even if the best ones all end; only an end among the first `width` counts
as an answer. Answers compete by their log probability over their length to the power of
`length_penalty`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from attrs import frozen

from modulm.engine.outputs import BeamSearchSequence, Logprob, Position
from modulm.errors import RequestError

__all__ = ["Ask", "beam_search"]

#: (sequences, k) -> for each, its k most probable next tokens with their log probabilities.
Ask = Callable[[Sequence[Sequence[int]], int], list[dict[int, float]]]


@frozen(order=False)
class _Beam:
    """score: log probability of the answer; tokens: prompt and answer; steps: of the answer."""

    score: float
    tokens: tuple[int, ...]
    steps: tuple[Position, ...] = ()

    def longer(self, token: int, logprob: float) -> _Beam:
        step = {token: Logprob(logprob)}
        return _Beam(self.score + logprob, (*self.tokens, token), (*self.steps, step))


def beam_search(
    ask: Ask,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    eos: Sequence[int],
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[BeamSearchSequence]:
    """The `width` best answers, best first; each ends with its end-of-sequence token if it has one.

    early_stopping: True ends when there are `width` answers; False when the best running beam
    could not displace one if it ended now; "never" when it could not at any length.
    """
    _check(width, max_tokens, early_stopping)
    keep = max(2, 1 + len(eos)) * width
    running = [_Beam(0.0, tuple(prompt))]
    answers: list[tuple[float, _Beam]] = []
    for length in range(1, max_tokens + 1):
        best = _continuations(ask, running, keep)
        ended = [beam.tokens[-1] in eos or length == max_tokens for beam in best]
        for beam, over in list(zip(best, ended, strict=True))[:width]:
            if over:
                answers.append((beam.score / length**length_penalty, beam))
        answers = sorted(answers, key=lambda answer: -answer[0])[:width]
        running = [beam for beam, over in zip(best, ended, strict=True) if not over][:width]
        full = len(answers) == width
        if not running or (full and early_stopping is True):
            break
        reach = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        if full and running[0].score / reach**length_penalty <= answers[-1][0]:
            break
    return [_sequence(beam, eos) for _, beam in answers]


def _check(width: int, max_tokens: int, early_stopping: bool | str) -> None:
    if width < 1:
        raise RequestError(f"beam_width must be at least 1, not {width}", "beam_width")
    if max_tokens < 1:
        raise RequestError("the prompt leaves no room for an answer", "max_tokens")
    if early_stopping not in (True, False, "never"):
        raise RequestError('early_stopping must be True, False or "never"', "early_stopping")


def _continuations(ask: Ask, running: Sequence[_Beam], keep: int) -> list[_Beam]:
    """The `keep` best beams that are one token longer."""
    found = [
        (beam.score + logprob, -place, beam, token, logprob)
        for place, (beam, best) in enumerate(
            zip(running, ask([beam.tokens for beam in running], keep), strict=True)
        )
        for token, logprob in best.items()
    ]
    chosen = heapq.nlargest(keep, found, key=lambda item: item[:2])
    return [beam.longer(token, logprob) for _, _, beam, token, logprob in chosen]


def _sequence(beam: _Beam, eos: Sequence[int]) -> BeamSearchSequence:
    stopped = beam.tokens[-1] in eos
    return BeamSearchSequence(
        tokens=list(beam.tokens),
        logprobs=list(beam.steps),
        cum_logprob=beam.score,
        finish_reason="stop" if stopped else "length",
    )
