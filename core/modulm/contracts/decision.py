"""Why a driver was chosen: a value kept with every choice, printed by `modulm explain`."""

from __future__ import annotations

from attrs import frozen

__all__ = ["API", "Decision", "Verdict"]

API = 1


@frozen
class Verdict:
    """One candidate: `reason` says why it was rejected, or is None if it would have done."""

    name: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@frozen
class Decision:
    """One choice: what was chosen, among which candidates, and why the winner won."""

    subject: str
    candidates: tuple[Verdict, ...]
    winner: str | None
    reason: str
