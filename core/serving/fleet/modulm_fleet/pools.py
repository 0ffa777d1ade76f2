"""Replicas in two pools: some compute prompts, the others continue them.

A prompt first goes to a prefill replica, as a sequence of its own that ends after one token. As
soon as that runs, the request goes to a decode replica, which fetches the prompt's KV cache while
it is being computed.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, evolve

from modulm.contracts.sampling import OutputKind, SamplingParams
from modulm.errors import ConfigError, EngineStalled
from modulm_fleet.flags import FleetConfig
from modulm_fleet.router import Router

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.requests import Request, StepEvents

__all__ = ["PoolRouter", "pool_flags"]

#: Blocks that a decode replica rather computes itself.
_FEW_BLOCKS = 2
#: The field of requests and answers; see `modulm_kv_transfer.remote`.
_FIELD = "kv_transfer_params"


def pool_flags(config: EngineConfig, index: int) -> Mapping[str, Any]:
    """Return the flags that differ between the pools, for the replica `index`; {} without pools.

    Raises ConfigError.
    """
    prefill = config.group(FleetConfig).prefill_replicas
    if not prefill:
        return {}
    table = dict(config.value("kv_transfer_config") or {"kv_connector": "peer"})
    if "kv_role" in table:
        message = "kv_role: remove it, --prefill-replicas and --decode-replicas set it"
        raise ConfigError("kv_transfer_config", message)
    # If all decode replicas die, prefill replicas fetch what was computed for them.
    role = "kv_both" if index < prefill else "kv_consumer"
    return {"kv_transfer_config": {**table, "kv_role": role}}


@define(eq=False)
class _Prefill:
    """A prompt that a prefill replica computes. requests: those that wait for it to run."""

    name: str
    requests: list[Request]


class PoolRouter(Router):
    """Routes prompts to the first `prefill` replicas and answers to the others.

    If no replica of a pool accepts requests, those of the other one compute everything.
    """

    def __init__(
        self, prefill: int, replicas: int, block: int, capacity: int, algorithm: str = "sha256",
        shared: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(replicas, block, capacity, algorithm, shared)
        self._least = _FEW_BLOCKS * block
        self._pools = np.arange(replicas) < prefill
        self._numbers = count()
        #: By the name of its sequence, and by those of the requests.
        self._prefills: dict[str, _Prefill] = {}
        self._prefill_of: dict[str, _Prefill] = {}
        #: Sequences whose prefill replica died.
        self._whole: set[str] = set()
        self._sends_prefill = False

    def first(self, requests: Sequence[Request]) -> Sequence[Request]:
        request = requests[0]
        if not self._wants_prefill(request):
            return requests
        name = f"{request.id}+prefill{next(self._numbers)}"
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY,
            extra_args={_FIELD: {"do_remote_decode": True}},
        )  # fmt: skip
        prefill = _Prefill(name, list(requests))
        self._prefills[name] = prefill
        self._prefill_of.update((each.id, prefill) for each in requests)
        return [evolve(request, id=name, params=params, seed=None, bad_words=())]

    def _wants_prefill(self, request: Request) -> bool:
        """Whether enough of the prompt is to be computed, and a prefill replica can do it."""
        params = request.params
        if not isinstance(params, SamplingParams) or (params.extra_args or {}).get(_FIELD):
            return False
        if not (self.prefixes.capacity and request.reads_prefix and request.adapter is None):
            return False
        if request.id in self._whole or request.prompt_len < self._least:
            return False
        up = np.array(self._up)
        if not ((up & self._pools).any() and (up & ~self._pools).any()):
            return False
        names, ends = self.names(request)
        cached = self._cached(request)
        return self._choose(names, ends, request.prompt_len, cached)[1] >= self._least

    def send(self, requests: Sequence[Request]) -> int:
        self._sends_prefill = requests[0].id in self._prefills
        try:
            return super().send(requests)
        finally:
            self._sends_prefill = False

    def _choose(
        self, names: list[bytes], ends: list[int], tokens: int, cached: Mapping[int, int]
    ) -> tuple[int, float]:
        right = self._pools if self._sends_prefill else ~self._pools
        for pool in (right, ~right):
            with self._only(pool):
                try:
                    return super()._choose(names, ends, tokens, cached)
                except EngineStalled:
                    continue
        raise EngineStalled("no replica accepts requests")

    @contextmanager
    def _only(self, pool: np.ndarray) -> Iterator[None]:
        """Let only these replicas accept requests."""
        up, loads = self._up, self._all
        self._up = (np.array(up) & pool).tolist()
        self._all = np.where(pool, loads, np.inf)
        try:
            yield
        finally:
            self._up, self._all = up, loads

    def following(self, events: StepEvents) -> list[Sequence[Request]]:
        ready: list[Sequence[Request]] = []
        for name, params in events.transfer_params.items():
            if name in self._prefills:
                # The blocks arrive while they are being computed.
                source = {**params, "remote_computing": True}
                ready.append([_fetching(each, source) for each in self._take(name)])
        for finish in events.finished:
            if finish.request in self._prefills:
                ready.append(self._take(finish.request))
                self._forget(finish.request)
        return [requests for requests in ready if requests]

    def _take(self, name: str) -> list[Request]:
        """Return the requests that wait for a prefill, which wait no more."""
        prefill = self._prefills[name]
        requests, prefill.requests = prefill.requests, []
        return requests

    def _forget(self, name: str) -> None:
        prefill = self._prefills.pop(name)
        self._prefill_of = {k: v for k, v in self._prefill_of.items() if v is not prefill}

    def withdraw(self, sequence: str) -> list[tuple[int, str]]:
        sent = super().withdraw(sequence)
        prefill = self._prefill_of.pop(sequence, None)
        if prefill is not None:
            prefill.requests = [each for each in prefill.requests if each.id != sequence]
            if prefill not in self._prefill_of.values() and prefill.name in self._prefills:
                del self._prefills[prefill.name]
                sent += super().withdraw(prefill.name)
        return sent

    def replica(self, sequence: str) -> int | None:
        replica = super().replica(sequence)
        prefill = self._prefill_of.get(sequence)
        return super().replica(prefill.name) if replica is None and prefill else replica

    def record_end(self, sequence: str) -> None:
        super().record_end(sequence)
        self._whole.discard(sequence)

    def remove(self, replica: int) -> list[str]:
        """See `Router.remove`. Requests of a lost prefill are computed by a decode replica."""
        lost: list[str] = []
        for name in super().remove(replica):
            if name not in self._prefills:
                lost.append(name)
                continue
            waiting = [each.id for each in self._take(name)]
            self._forget(name)
            self._whole.update(waiting)
            lost += waiting
        return lost


def _fetching(request: Request, params: Mapping[str, Any]) -> Request:
    """Return the request with `kv_transfer_params`."""
    settings = request.params
    if not isinstance(settings, SamplingParams):
        return request
    extra = {**(settings.extra_args or {}), _FIELD: params}
    return evolve(request, params=settings.with_(extra_args=extra))
