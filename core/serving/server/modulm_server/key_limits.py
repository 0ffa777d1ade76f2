"""Limits per API key: rates of requests and tokens, and how many run at once.

A rate is a bucket that holds the requests or tokens of a minute and fills evenly. Tokens are
charged when they are known: those of the prompt when a request starts, generated ones as they come.
So a bucket may be overdrawn, and new requests wait until it has filled.
"""

from __future__ import annotations

import math
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from modulm_server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from modulm_server.api_keys import ApiKey

__all__ = [
    "Bucket", "Caller", "KeyUsage", "Rate", "Usages", "current_caller", "current_key",
    "rate_headers", "set_caller",
]  # fmt: skip

_MINUTE = 60.0


@define(eq=False)
class Bucket:
    """A rate per minute. clock: seconds, monotonic."""

    clock: Callable[[], float] = time.monotonic
    limit: float = 0.0
    _level: float = field(default=0.0, init=False)
    _at: float = field(default=0.0, init=False)

    def set_limit(self, limit: float) -> None:
        """Change the limit; what was used stays used."""
        if limit != self.limit:
            self._fill()
            self._level += limit - self.limit
            self.limit = limit

    def _fill(self) -> None:
        now = self.clock()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / _MINUTE)
        self._at = now

    @property
    def remaining(self) -> int:
        """What may be used now."""
        self._fill()
        return max(0, math.floor(self._level))

    @property
    def reset(self) -> float:
        """Seconds until the bucket is full."""
        self._fill()
        return (self.limit - self._level) * _MINUTE / self.limit

    def wait(self, amount: float) -> float:
        """Seconds until the amount may be used, at most a full bucket."""
        self._fill()
        return max(0.0, (min(amount, self.limit) - self._level) * _MINUTE / self.limit)

    def take(self, amount: float) -> None:
        """Use an amount, also beyond what is left."""
        self._fill()
        self._level -= amount


@define(eq=False)
class KeyUsage:
    """What a key has used: `connections` and `streams` are those at this moment."""

    requests: Bucket = field(factory=Bucket)
    tokens: Bucket = field(factory=Bucket)
    connections: int = 0
    streams: int = 0


@define(eq=False)
class Usages:
    """The usage of each key, by owner. processes: server processes that divide the limits."""

    processes: int = 1
    _usages: dict[str, KeyUsage] = field(factory=dict, init=False)

    def of(self, key: ApiKey) -> KeyUsage:
        """The usage of a key, with the limits that are in force now."""
        usage = self._usages.get(key.owner)
        if usage is None:
            usage = self._usages[key.owner] = KeyUsage()
        usage.requests.set_limit((key.requests_per_minute or 0) / self.processes)
        usage.tokens.set_limit((key.tokens_per_minute or 0) / self.processes)
        return usage

    def share(self, limit: int) -> int:
        """This process's part of a limit on what runs at once."""
        return max(1, limit // self.processes)


@frozen
class Rate:
    """A rate of a key. kind: `requests` or `tokens`. limit: per minute. remaining: what may be used
    now. reset: seconds until all of it may be used.
    """

    kind: str
    limit: int
    remaining: int
    reset: int


@define(eq=False)
class Caller:
    """Whose request the current task answers. internal: the server sent it for a batch."""

    key: ApiKey
    usage: KeyUsage
    usages: Usages
    internal: bool = False
    _streams: bool = field(default=False, init=False)
    _left: bool = field(default=False, init=False)

    def enter(self, method: str) -> None:
        """Count a request that begins. Raises ApiError(429) beyond the key's limits."""
        key, usage = self.key, self.usage
        if self.internal:
            return
        if key.connections is not None:
            most = self.usages.share(key.connections)
            if usage.connections >= most:
                raise _too_many(f"{most} requests of this key are in progress")
        if key.requests_per_minute is not None and method == "POST":
            if wait := usage.requests.wait(1):
                raise _too_fast(f"{key.requests_per_minute} requests", wait)
            usage.requests.take(1)
        usage.connections += 1

    def leave(self) -> None:
        """Count a request that has ended; what it left running in the background is no stream."""
        self._left = True
        self.usage.connections -= not self.internal
        self.usage.streams -= self._streams

    def check_stream(self) -> None:
        """Raise ApiError(429) if a stream would exceed the key's limit: before its prompt costs."""
        if self._streams or self._left or self.internal or self.key.streams is None:
            return
        most = self.usages.share(self.key.streams)
        if self.usage.streams >= most:
            raise _too_many(f"{most} streams of this key are open")

    def start_stream(self) -> None:
        """Count the request as a stream. Raises ApiError(429) beyond the key's limit."""
        if self._streams or self._left or self.internal:
            return
        self.check_stream()
        self._streams = True
        self.usage.streams += 1

    def check_tokens(self, prompt: int) -> None:
        """Charge the tokens of a prompt. Raises ApiError(429) if the key has used up its tokens,
        except for requests of batches, which run slower instead.
        """
        limit = self.key.tokens_per_minute
        if limit is None:
            return
        wait = self.usage.tokens.wait(prompt)
        if wait and not self.internal:
            raise _too_fast(f"{limit} tokens", wait)
        self.usage.tokens.take(prompt)

    def charge(self, tokens: int) -> None:
        """Charge generated tokens."""
        if self.key.tokens_per_minute is not None:
            self.usage.tokens.take(tokens)

    def rates(self) -> Iterator[Rate]:
        """The key's rates, as they are used now."""
        limits = (
            ("requests", self.key.requests_per_minute, self.usage.requests),
            ("tokens", self.key.tokens_per_minute, self.usage.tokens),
        )
        for kind, limit, bucket in limits:
            if limit is not None:
                yield Rate(kind, limit, bucket.remaining, math.ceil(bucket.reset))


def rate_headers(rates: Iterable[Rate]) -> Iterator[tuple[bytes, bytes]]:
    """The headers of a response that tell its key's rates, with OpenAI's names."""
    for rate in rates:
        values = (("limit", rate.limit), ("remaining", rate.remaining), ("reset", f"{rate.reset}s"))
        for name, value in values:
            yield f"x-ratelimit-{name}-{rate.kind}".encode(), str(value).encode()


_caller: ContextVar[Caller | None] = ContextVar("modulm_caller", default=None)


def current_caller() -> Caller | None:
    """Whose request the current task answers; None on a server without keys."""
    return _caller.get()


def current_key() -> ApiKey | None:
    """The key of the current task's request; None on a server without keys."""
    caller = _caller.get()
    return None if caller is None else caller.key


def set_caller(caller: Caller | None) -> None:
    """Say whose request the current task answers."""
    _caller.set(caller)


def _too_fast(limit: str, wait: float) -> ApiError:
    seconds = max(1, math.ceil(wait))
    return ApiError(
        429,
        f"this key's limit of {limit} per minute is reached; try again in {seconds} s",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
    )


def _too_many(reason: str) -> ApiError:
    return ApiError(
        429,
        f"{reason}, which is its limit; try again when one has ended",
        code="concurrency_limit_exceeded",
        headers={"Retry-After": "1"},
    )
