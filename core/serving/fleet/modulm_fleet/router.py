"""Which replica a request is sent to: where least is left to compute before its first token.

That is what the replica has to do already, in tokens, and what of the prompt it does not hold. So
a request goes where its prefix lies unless that replica is so busy that another one would have
computed the prefix sooner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from modulm.errors import EngineStalled
from modulm_fleet.prefixes import HeldPrefixes, PrefixNames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.requests import Request

__all__ = ["Router"]

#: Prompt tokens that a sequence which gives tokens counts as: each step takes longer for it.
_RUNNING = 16.0
#: Prompt tokens that a sequence of another front end counts as, of which no more is known.
_FOREIGN = 192.0
#: Holders of a piece that are looked at; where more hold it, so many of them in turn.
_FEW = 8
#: Odd, so that multiplying by it loses nothing: spreads what differs in few bits.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


@frozen
class _Charge:
    """What a sequence adds to its replica's load. missing: prompt tokens to compute."""

    replica: int
    missing: float


class Router:
    """Sends requests to replicas, by number. Not for several threads at once.

    capacity: tokens that a replica's cache holds. shared: whether other front ends send requests
    to the same replicas; they then agree on where a prefix belongs that none of them has seen.
    """

    def __init__(
        self, replicas: int, block: int, capacity: int, algorithm: str = "sha256",
        shared: bool = False,
    ) -> None:  # fmt: skip
        self.names = PrefixNames(block, algorithm)
        self.held = HeldPrefixes(replicas, capacity)
        self._shared = shared
        self._loads = [0.0] * replicas
        # The same for all replicas at once, infinite where one takes no requests.
        self._all = np.zeros(replicas)
        self._up = [True] * replicas
        self._own = [0] * replicas
        self._foreign = [0] * replicas
        self._open: dict[str, _Charge] = {}
        #: By replica: sequences that have given nothing yet.
        self._computing: list[set[str]] = [set() for _ in range(replicas)]
        self._turn = 0
        salts = np.arange(1, replicas + 1, dtype=np.uint64) * _SPREAD
        self._salts = salts ^ (salts >> np.uint64(29))

    def __len__(self) -> int:
        return len(self._open)

    @property
    def loads(self) -> Sequence[float]:
        """What each replica has to do, in prompt tokens."""
        return self._loads

    def replica(self, sequence: str) -> int | None:
        """Where a sequence was sent that has not ended."""
        charge = self._open.get(sequence)
        return None if charge is None else charge.replica

    def send(self, requests: Sequence[Request]) -> int:
        """The replica for the sequences of one request, whose prompts begin alike; they count as
        sent. Raises EngineStalled if none takes requests.
        """
        request = requests[0]
        names: list[bytes] = []
        ends: list[int] = []
        if self.held.capacity and request.reads_prefix:
            names, ends = self.names(request)
        return self.send_named([r.id for r in requests], names, ends, request.prompt_len)

    def send_named(
        self, sequences: Sequence[str], names: list[bytes], ends: list[int], tokens: int
    ) -> int:
        """As `send`, of a prompt of so many tokens whose pieces have been named."""
        replica, missing = self._choose(names, ends, tokens)
        self._count(replica, sequences, names, ends, missing)
        return replica

    def sent(
        self,
        replica: int,
        sequences: Sequence[str],
        names: list[bytes],
        ends: list[int],
        tokens: int,
    ) -> None:
        """As `send_named`, where somebody else has chosen."""
        pieces = zip(reversed(names), reversed(ends[: len(names)]), strict=True)
        held = next((end for name, end in pieces if self.held.holds(replica, name)), 0)
        self._count(replica, sequences, names, ends, float(tokens - held))

    def _count(
        self,
        replica: int,
        sequences: Sequence[str],
        names: list[bytes],
        ends: list[int],
        missing: float,
    ) -> None:
        """A replica gets a request; missing: tokens of its prompt to compute."""
        self.held.add(replica, names, ends)
        for sequence in sequences:
            self._open[sequence] = _Charge(replica, missing)
            self._own[replica] += 1
            self._computing[replica].add(sequence)
            self._charge(replica, missing + _RUNNING)
            missing = 0.0  # the others of the request find it computed

    def _choose(self, names: list[bytes], ends: list[int], tokens: int) -> tuple[int, float]:
        """The replica where least has to be done first, and how much of the prompt it lacks."""
        loads, held = self._loads, self.held
        idle = int(self._all.argmin())
        if not self._up[idle]:
            raise EngineStalled("no replica takes requests")
        least = loads[idle]
        best, left = idle, tokens
        cost = least + tokens
        for place in range(len(names) - 1, -1, -1):
            rest = tokens - ends[place]
            if least + rest >= cost:
                break
            holders = held.holders(names[place])
            if holders is None:
                continue
            if held.holds(idle, names[place]):
                best, left, cost = idle, rest, least + rest
            for replica in self._some(holders):
                if self._up[replica] and loads[replica] + rest < cost:
                    best, left, cost = replica, rest, loads[replica] + rest
        if left == tokens:
            best = self._first(names, least + tokens if self._shared else least)
        return best, float(left)

    def _some(self, holders: list[int]) -> list[int]:
        """Those who hold a piece, or where they are many a few of them, others each time."""
        if len(holders) <= _FEW:
            return holders
        self._turn += _FEW
        first = self._turn % len(holders)
        return holders[first : first + _FEW]

    def _first(self, names: list[bytes], most: float) -> int:
        """Where a prompt goes that no replica has seen: of those that have no more than `most` to
        do the one that its beginning belongs to, so that caches fill alike.
        """
        self._turn += 1
        key = int.from_bytes(names[0][:8], "little") if names else self._turn
        places = np.flatnonzero(self._all <= most)
        scores = (self._salts[places] ^ np.uint64(key)) * _SPREAD
        return int(places[(scores ^ scores >> np.uint64(32)).argmax()])

    def gave(self, replica: int, sequences: Sequence[str]) -> None:
        """Sequences have given a token: their prompts are computed."""
        computing = self._computing[replica]
        if computing:
            for sequence in computing.intersection(sequences):
                computing.discard(sequence)
                charge = self._open[sequence]
                self._open[sequence] = _Charge(replica, 0.0)
                self._charge(replica, -charge.missing)

    def ended(self, sequence: str) -> None:
        """A sequence has ended; unknown ones are ignored."""
        charge = self._open.pop(sequence, None)
        if charge is not None:
            self._own[charge.replica] -= 1
            self._computing[charge.replica].discard(sequence)
            self._charge(charge.replica, -charge.missing - _RUNNING)

    def heard(self, replica: int, sequences: int) -> None:
        """A replica tells how many sequences it has, of all front ends."""
        foreign = max(0, sequences - self._own[replica])
        if foreign != self._foreign[replica]:
            self._charge(replica, _FOREIGN * (foreign - self._foreign[replica]))
            self._foreign[replica] = foreign

    def up(self, replica: int) -> None:
        """A replica takes requests."""
        self._up[replica] = True
        self._all[replica] = self._loads[replica]

    def down(self, replica: int) -> None:
        """A replica takes no requests until it is `up` again; what it has goes on."""
        self._up[replica] = False
        self._all[replica] = np.inf

    def lost(self, replica: int) -> list[str]:
        """A replica is gone with all that it held; the sequences that it had."""
        self.down(replica)
        self.held.forget(replica)
        gone = [name for name, charge in self._open.items() if charge.replica == replica]
        for name in gone:
            del self._open[name]
        self._computing[replica].clear()
        self._own[replica] = self._foreign[replica] = 0
        self._loads[replica] = 0.0
        return gone

    def forget_prefixes(self) -> None:
        """All replicas have emptied their caches."""
        for replica in range(self.held.replicas):
            self.held.forget(replica)

    def _charge(self, replica: int, tokens: float) -> None:
        self._loads[replica] += tokens
        if self._up[replica]:
            self._all[replica] = self._loads[replica]
