"""Limits: what a step and the queue may hold."""

from __future__ import annotations

from attrs import frozen

__all__ = ["Limits"]


@frozen(kw_only=True)
class Limits:
    """What a step and the queue may hold.

    rows: sequences that run at once; tokens: per step; chunked: whether prompts may be split over
    steps; long: prompts are taken in chunks of at most this many tokens (0: no such bound);
    partial, long_partial: how many prompts, and how many longer than `long`, may be unfinished at
    once (None: any number); spare: share of blocks left free when a request joins others;
    reserve: admit a request only if all its tokens fit now; prefixes, hash: prefix reuse;
    queued_requests, queued_tokens: bounds of the queue (None: none); stages: plans under way at
    once of which each has other rows.
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
