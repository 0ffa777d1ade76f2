"""The default drafts beside plain decoding: the same answers, whatever is drafted and verified."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from modulm import LLM
from modulm_speculation.adaptive import Adaptive

__all__ = ["accepted", "any_counts", "outcome", "same_with_drafts"]


def any_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chance decide how many drafts are verified, the same way in every run, and not the times
    that steps take.
    """
    draw = random.Random(0)
    monkeypatch.setattr(Adaptive, "_best", lambda self, rows, gains: draw.randint(0, len(gains)))
    monkeypatch.setattr(Adaptive, "rest", lambda self, rows: False)


def outcome(output: Any) -> list[tuple[Any, ...]]:
    """Of each choice: tokens, text, why it ended, and logprobs to the bit; then the prompt's."""
    return [
        *(
            (
                answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason,
                positions(answer.logprobs), answer.cumulative_logprob, answer.sampling_mask,
            )
            for answer in output.outputs
        ),
        positions(output.prompt_logprobs),
    ]  # fmt: skip


def positions(logprobs: Iterable[Any] | None) -> list[Any]:
    """Tokens, logprobs and ranks of each place."""
    return [
        None if place is None else [(t, e.logprob, e.rank) for t, e in place.items()]
        for place in logprobs or ()
    ]


def accepted(outputs: Iterable[Any]) -> int:
    """How many drafts of these outputs were accepted."""
    metrics = [a.spec_decode_metrics for output in outputs for a in output.outputs]
    return sum(right for each in metrics if each is not None for _, right in each.steps)


def same_with_drafts(folder: str, ask: Callable[[LLM], list[Any]], **flags: Any) -> int:
    """Ask an engine that drafts as by default, and one that does not: check that their outputs are
    the same, and that drafts were accepted. Return how many.
    """
    found = []
    for speculative in ("off", "auto"):
        with LLM(folder, **{"speculative": speculative, **flags}) as llm:
            found.append(ask(llm))
    plain, drafted = found
    for number, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        assert outcome(one) == outcome(other), f"output {number}"
    assert not accepted(plain)
    count = accepted(drafted)
    assert count
    return count
