"""Decisions as text for `modulm explain`, and as JSON values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import asdict

from modulm.contracts.decision import Decision

__all__ = ["as_data", "render"]


def as_data(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """The decisions as JSON values."""
    return [asdict(decision) for decision in decisions]


def render(decisions: Iterable[Decision]) -> str:
    """The decisions for people: one block each, the winner first, then the others and why not."""
    return "\n".join(_block(decision) for decision in decisions)


def _block(decision: Decision) -> str:
    lines = [f"{decision.subject}: {decision.winner or 'nothing'} ({decision.reason})"]
    won = (decision.winner or "").split(", ")
    others = [v for v in decision.candidates if v.name not in won]
    width = max((len(verdict.name) for verdict in others), default=0)
    lines += [f"  {v.name:{width}}  {v.reason or 'would do too'}" for v in others]
    return "\n".join(lines)
