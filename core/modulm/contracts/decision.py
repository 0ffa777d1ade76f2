"""Why a driver was chosen, recorded with every choice and printed by `modulm explain`."""

from __future__ import annotations

from attrs import frozen

__all__ = ["API", "Decision", "Verdict"]

API = 1


@frozen
class Verdict:
    """One candidate. `reason`: why it was rejected, or None if it was suitable."""

    name: str
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@frozen
class Decision:
    """One choice: its subject, the candidates, the winner, and the reason."""

    subject: str
    candidates: tuple[Verdict, ...]
    winner: str | None
    reason: str
