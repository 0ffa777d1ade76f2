"""Decisions as text for `modulm explain`, and as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import asdict

from modulm.contracts.decision import Decision, Verdict

__all__ = ["as_data", "render"]


def as_data(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """Convert decisions to JSON values."""
    return [asdict(decision) for decision in decisions]


def render(decisions: Sequence[Decision], everything: bool = False) -> str:
    """Format decisions as text: the winner first, then the other candidates.

    everything: include rejected candidates, with reasons.
    """
    lines = [_block(decision, everything) for decision in decisions]
    hidden = [v for d in decisions for v in _others(d) if not everything and _hidden(d, v)]
    if hidden:
        lines.append(f"{len(hidden)} candidates were rejected: --all shows them, with reasons")
    return "\n".join(lines)


def _others(decision: Decision) -> list[Verdict]:
    won = (decision.winner or "").split(", ")
    return [verdict for verdict in decision.candidates if verdict.name not in won]


def _hidden(decision: Decision, verdict: Verdict) -> bool:
    """Whether a verdict is shown only with --all. If nothing was chosen, all are shown."""
    return verdict.reason is not None and decision.winner is not None


def _block(decision: Decision, everything: bool) -> str:
    lines = [f"{decision.subject}: {decision.winner or 'nothing'} ({decision.reason})"]
    others = [v for v in _others(decision) if everything or not _hidden(decision, v)]
    width = max((len(verdict.name) for verdict in others), default=0)
    lines += [f"  {v.name:{width}}  {v.reason or 'would do too'}" for v in others]
    return "\n".join(lines)
