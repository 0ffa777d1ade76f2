"""Limits of a step and of the queue."""

from __future__ import annotations

from attrs import frozen

from modulm.errors import QueueFull

__all__ = ["Limits"]


@frozen(kw_only=True)
class Limits:
    """Limits of a step and of the queue.

    rows: sequences that run at once. tokens: token budget per step. chunked: whether prompts may be
    split over steps. long: maximum tokens of a chunk (0: no limit). partial, long_partial: how many
    prompts, and prompts longer than `long`, may be unfinished at once (None: any). spare: fraction
    of blocks kept free when a request joins others. reserve: admit a request only if all its tokens
    fit. prefixes, hash: prefix reuse. queued_requests, queued_tokens: limits of the queue (None: no
    limit). stages: pipeline stages; as many plans with different rows are in flight.
    """

    rows: int = 256
    tokens: int = 2048
    chunked: bool = True
    long: int = 0
    partial: int | None = None
    long_partial: int | None = None
    spare: float = 0.0
    reserve: bool = True
    prefixes: bool = True
    hash: str = "sha256"
    queued_requests: int | None = None
    queued_tokens: int | None = None
    stages: int = 1

    def check_room(self, waiting: tuple[int, int], more: tuple[int, int], free: int) -> None:
        """Raise QueueFull if `more` (requests, tokens) exceed the limits of the queue together with
        those that wait. free: number of free rows.
        """
        bound = self.queued_requests
        if bound is not None and waiting[0] + more[0] > bound + free:
            raise QueueFull(f"{waiting[0]} requests are already waiting; try again later")
        bound = self.queued_tokens
        if bound is not None and not free and waiting[1] + more[1] > bound:
            raise QueueFull(f"{waiting[1]} tokens are already waiting; try again later")
