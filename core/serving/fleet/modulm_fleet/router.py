"""Choose the replica that has the fewest tokens to compute before a request's first token.

These are the replica's pending tokens plus the part of the prompt that it has not cached. So a
request goes where its prefix is cached, unless that replica is so busy that another one would
compute the prefix sooner.

What a replica has cached is known from its events (`record_events`), if it publishes any, and
otherwise estimated from what it was sent. With events, prompts are estimated only until they are
computed, or while events are missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from modulm.errors import EngineStalled
from modulm_fleet.cached_blocks import CachedBlocks
from modulm_fleet.prefixes import CachedPrefixes, PrefixHasher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from modulm.contracts.requests import Request, StepEvents

__all__ = ["Router"]

#: Prompt tokens that a decoding sequence counts as, since it makes each step longer.
_RUNNING = 16.0
#: Prompt tokens that a sequence of another front end counts as; nothing else is known of it.
_FOREIGN = 192.0
#: Holders of a piece that are compared; if more hold it, this many in turn.
_FEW = 8
#: Odd multiplier that spreads values which differ in few bits.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@frozen
class _Charge:
    """The load of a sequence on its replica. missing: prompt tokens to compute. names: the prompt's
    pieces until they are.
    """

    replica: int
    missing: float
    names: Sequence[bytes] = ()


class Router:
    """Routes requests to replicas, by index. Not thread-safe.

    capacity: tokens of a replica's cache. shared: whether other front ends use the same replicas;
    all then choose the same one for a prefix that none has seen.
    """

    def __init__(
        self, replicas: int, block: int, capacity: int, algorithm: str = "sha256",
        shared: bool = False,
    ) -> None:  # fmt: skip
        self.names = PrefixHasher(block, algorithm)
        self.prefixes = CachedPrefixes(replicas, capacity)
        self.blocks = CachedBlocks(replicas, block, 2 * capacity // block, algorithm)
        self._shared = shared
        self._loads = [0.0] * replicas
        # The loads as an array; infinite for replicas that take no requests.
        self._all = np.zeros(replicas)
        self._up = [True] * replicas
        self._sent = [0] * replicas
        self._foreign = [0] * replicas
        self._open: dict[str, _Charge] = {}
        #: By replica: sequences without a token so far.
        self._computing: list[set[str]] = [set() for _ in range(replicas)]
        self._turn = 0
        salts = np.arange(1, replicas + 1, dtype=np.uint64) * _SPREAD
        self._salts = salts ^ (salts >> np.uint64(29))

    def __len__(self) -> int:
        return len(self._open)

    @property
    def loads(self) -> Sequence[float]:
        """The load of each replica, in prompt tokens."""
        return self._loads

    def replica(self, sequence: str) -> int | None:
        """The replica of a running sequence; None for an unknown one."""
        charge = self._open.get(sequence)
        return None if charge is None else charge.replica

    def first(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return what to `send` for the sequences of one request: they, or what precedes them."""
        return requests

    def following(self, events: StepEvents) -> list[Sequence[Request]]:
        """Return requests to `send`, after a step of what preceded them."""
        return []

    def send(self, requests: Sequence[Request]) -> int:
        """Choose a replica for the sequences of one request, which share a prompt, and record them.
        Raises EngineStalled if no replica accepts requests.
        """
        request = requests[0]
        names: list[bytes] = []
        ends: list[int] = []
        if self.prefixes.capacity and request.reads_prefix:
            names, ends = self.names(request)
        sequences = [r.id for r in requests]
        return self._send(sequences, names, ends, request.prompt_len, self._cached(request))

    def _cached(self, request: Request) -> Mapping[int, int]:
        """Tokens of the prompt that replicas have cached, by their events."""
        reads = self.prefixes.capacity and request.reads_prefix
        return self.blocks.cached(request) if reads else {}

    def send_named(
        self, sequences: Sequence[str], names: list[bytes], ends: list[int], tokens: int
    ) -> int:
        """See `send`: for a prompt of `tokens` tokens whose pieces are hashed."""
        return self._send(sequences, names, ends, tokens, {})

    def _send(
        self, sequences: Sequence[str], names: list[bytes], ends: list[int], tokens: int,
        cached: Mapping[int, int],
    ) -> int:  # fmt: skip
        replica, missing = self._choose(names, ends, tokens, cached)
        self._count(replica, sequences, names, ends, missing)
        return replica

    def record_sent(
        self,
        replica: int,
        sequences: Sequence[str],
        names: list[bytes],
        ends: list[int],
        tokens: int,
    ) -> None:
        """Record sequences that were sent to a replica chosen elsewhere."""
        pieces = zip(reversed(names), reversed(ends[: len(names)]), strict=True)
        cached = next((end for name, end in pieces if self.prefixes.holds(replica, name)), 0)
        self._count(replica, sequences, names, ends, float(tokens - cached))

    def _count(
        self,
        replica: int,
        sequences: Sequence[str],
        names: list[bytes],
        ends: list[int],
        missing: float,
    ) -> None:
        """Record a request of a replica. missing: tokens of its prompt to compute."""
        self.prefixes.add(replica, names, ends)
        for sequence in sequences:
            self._open[sequence] = _Charge(replica, missing, names)
            self._sent[replica] += 1
            self._computing[replica].add(sequence)
            self._charge(replica, missing + _RUNNING)
            missing = 0.0  # the other sequences of the request find the prompt cached

    def _choose(
        self, names: list[bytes], ends: list[int], tokens: int, cached: Mapping[int, int]
    ) -> tuple[int, float]:
        """The replica with the least to compute first, and the tokens of the prompt it lacks.

        cached: see `_cached`.
        """
        loads, prefixes = self._loads, self.prefixes
        idle = int(self._all.argmin())
        if not self._up[idle]:
            raise EngineStalled("no replica accepts requests")
        least = loads[idle]
        best, left = idle, tokens
        cost = least + tokens
        for index in range(len(names) - 1, -1, -1):
            rest = tokens - ends[index]
            if least + rest >= cost:
                break
            holders = prefixes.holders(names[index])
            if holders is None:
                continue
            if prefixes.holds(idle, names[index]):
                best, left, cost = idle, rest, least + rest
            for replica in self._some(holders):
                if self._up[replica] and loads[replica] + rest < cost:
                    best, left, cost = replica, rest, loads[replica] + rest
        for replica, known in cached.items():
            rest = tokens - known
            if self._up[replica] and loads[replica] + rest < cost:
                best, left, cost = replica, rest, loads[replica] + rest
        if left == tokens:
            best = self._first(names, least + tokens if self._shared else least)
        return best, float(left)

    def _some(self, holders: list[int]) -> list[int]:
        """The holders of a piece, or a few of many, different ones each time."""
        if len(holders) <= _FEW:
            return holders
        self._turn += _FEW
        first = self._turn % len(holders)
        return holders[first : first + _FEW]

    def _first(self, names: list[bytes], most: float) -> int:
        """The replica for a prompt that none has cached: among those with a load of at most `most`,
        the one with the highest hash of replica and first piece, so that caches fill evenly.
        """
        self._turn += 1
        key = int.from_bytes(names[0][:8], "little") if names else self._turn
        candidates = np.flatnonzero(self._all <= most)
        scores = (self._salts[candidates] ^ np.uint64(key)) * _SPREAD
        return int(candidates[(scores ^ scores >> np.uint64(32)).argmax()])

    def record_tokens(self, replica: int, sequences: Sequence[str]) -> None:
        """Record that sequences have produced a token, so their prompts are computed."""
        computing = self._computing[replica]
        if computing:
            for sequence in computing.intersection(sequences):
                computing.discard(sequence)
                charge = self._open[sequence]
                self._open[sequence] = _Charge(replica, 0.0)
                self._charge(replica, -charge.missing)

    def record_events(self, replica: int, events: Sequence[Any]) -> None:
        """Record a replica's KV events. What it has computed is no longer estimated.

        Raises ValueError if they have another layout.
        """
        self.blocks.apply(replica, events)
        if self.blocks.is_exact(replica):
            computing = self._computing[replica]
            self.prefixes.keep(replica, {n for s in computing for n in self._open[s].names})

    def record_end(self, sequence: str) -> None:
        """Record the end of a sequence. Unknown ones are ignored."""
        charge = self._open.pop(sequence, None)
        if charge is not None:
            self._sent[charge.replica] -= 1
            self._computing[charge.replica].discard(sequence)
            self._charge(charge.replica, -charge.missing - _RUNNING)

    def withdraw(self, sequence: str) -> list[tuple[int, str]]:
        """Record that a sequence is aborted; returns (replica, sequence) of all to abort."""
        charge = self._open.get(sequence)
        self.record_end(sequence)
        return [] if charge is None else [(charge.replica, sequence)]

    def record_load(self, replica: int, sequences: int) -> None:
        """Record how many sequences a replica has, of all front ends."""
        foreign = max(0, sequences - self._sent[replica])
        if foreign != self._foreign[replica]:
            self._charge(replica, _FOREIGN * (foreign - self._foreign[replica]))
            self._foreign[replica] = foreign

    def enable(self, replica: int) -> None:
        """Send requests to a replica from now on."""
        self._up[replica] = True
        self._all[replica] = self._loads[replica]

    def disable(self, replica: int) -> None:
        """Send no requests to a replica until `enable`; its sequences continue."""
        self._up[replica] = False
        self._all[replica] = np.inf

    def remove(self, replica: int) -> list[str]:
        """Forget all that a dead replica held; returns its sequences."""
        self.disable(replica)
        self.prefixes.forget(replica)
        sequences = [name for name, charge in self._open.items() if charge.replica == replica]
        for name in sequences:
            del self._open[name]
        self._computing[replica].clear()
        self._sent[replica] = self._foreign[replica] = 0
        self._loads[replica] = 0.0
        return sequences

    def forget_prefixes(self) -> None:
        """Record that all replicas have emptied their caches."""
        for replica in range(self.prefixes.replicas):
            self.prefixes.forget(replica)

    def _charge(self, replica: int, tokens: float) -> None:
        self._loads[replica] += tokens
        if self._up[replica]:
            self._all[replica] = self._loads[replica]
