"""Engines behind one client, with routing and restarts: several, or one with `--restart`.

Each replica is a process of this machine or another one. `modulm_fleet.router` chooses the replica
for a request. The front end that started a replica's process restarts it when it dies; other front
ends reconnect.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from modulm.contracts.requests import Request, StepEvents
from modulm.errors import EngineDead, EngineError, EngineStalled
from modulm_fleet.announce import Announcements
from modulm_fleet.placement import Placement
from modulm_fleet.router import Router
from modulm_server.engine.cache_events import CacheEvents
from modulm_server.engine.client import EngineRestarting, ReplicaHealth
from modulm_server.engine.core_client import (
    ReplicaEvents,
    ReplicaLost,
    ReplicaReady,
)
from modulm_server.engine.process_client import ProcessCoreClient
from modulm_server.engine.replica_calls import ReplicaCalls
from modulm_server.engine.replica_processes import (
    Address,
    Replica,
    check_alike,
    close_all,
    common_weights,
    make_router,
    replica_config,
    start_again,
    trouble_of,
)
from modulm_server.engine.rolling_restart import RollingRestart
from modulm_server.engine.shared_experts import SharedExperts, reach_all
from modulm_server.engine.spawn import EngineProcess
from modulm_server.flags import WatchdogConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["ReplicaSet"]

log = logging.getLogger("modulm.engine")

ReplicaNews: TypeAlias = ReplicaEvents | ReplicaLost | ReplicaReady

#: Seconds between two checks of the replicas.
_LOOK = 0.25
#: Seconds before a dead replica is restarted: the initial delay, doubled each time up to the second
#: number, and reset once the replica has lived that long.
_BACKOFF, _MOST = 0.5, 60.0
#: Seconds between attempts to reach a replica that another process starts.
_AGAIN = 0.5
#: The same while the front end starts.
_PATIENCE = 2.0


class ReplicaSet(ReplicaCalls):
    """The replicas of one front end. Reports their events as `ReplicaEvents`, sequences that must
    restart or fail as `ReplicaLost`, and replicas that take requests again as `ReplicaReady`.

    `open` creates it in the front end that starts processes, `join` in others. Waits until all
    replicas are ready (`join`: until one is) and raises the error of one that failed to start.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        tell: Callable[[ReplicaNews], None],
        died: Callable[[EngineDead], None],
    ) -> None:
        self._replicas: Sequence[Replica] = replicas
        self._tell = tell
        self._died = died
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._router: Router | None = None
        self._cache_events = CacheEvents(self._lock, lambda: self.router)
        #: The process that starts the replicas, if this one joined them.
        self._parent: int | None = None
        self._announced: Announcements | None = None
        #: For replicas that share experts and therefore end together.
        self._group: SharedExperts | None = None
        self._shared = False
        self._rolling = RollingRestart(replicas, self.drain, self.restart, self._ended)
        self._watcher = threading.Thread(target=self._watch, name="modulm-replicas", daemon=True)

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        plugins: PluginManager,
        tell: Callable[[ReplicaNews], None],
        died: Callable[[EngineDead], None],
        placed: Placement,
        first: EngineProcess | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        listeners: Sequence[socket.socket] = (),
        secret_file: str | None = None,
    ) -> ReplicaSet:
        """Start this machine's replicas as processes, the first one in `first`, and wait until
        those of other machines have announced themselves.

        listeners, secret_file: for processes that front ends of other machines connect to.
        """
        here = placed.here
        group = SharedExperts() if config.parallel.shared_experts else None
        if group is not None:
            config = config.with_parts(group.create_folder())
        processes: list[EngineProcess] = []
        replicas: list[Replica] = []
        announced = Announcements(config, placed, plugins) if placed.elsewhere else None
        try:
            for index, rank in enumerate(here):
                listener = listeners[index] if listeners else None
                if first is not None and not index:
                    process = first
                else:
                    process = EngineProcess(None, listener, secret_file)
                processes.append(process)
                replica_flags = replica_config(config, index, len(here))
                process.start(replica_flags, plugins)
                address = Address(rank, process.address, secret_file)
                again = partial(start_again, address, listener, replica_flags, plugins)
                replicas.append(Replica(address, again))
            meanwhile()
            if announced is not None:
                file = announced.secret_file
                addresses = [Address(rank, where, file) for rank, where in announced.wait()]
                replicas += [Replica(address, None) for address in addresses]
            replica_set = cls(replicas, tell, died)
            replica_set._announced, replica_set._group = announced, group
            if group is not None:
                for index, reached in enumerate(reach_all(replica_set._reach, processes)):
                    replica_set._attach(index, *reached)
            for index in range(len(replicas) if group is None else 0):
                owned = processes[index] if index < len(processes) else None
                replica_set._attach(index, *replica_set._await_ready(index, owned))
        except BaseException:
            for process in processes:
                process.kill()
                process.close()
            if group is not None:
                group.close()
            if announced is not None:
                announced.close()
            raise
        replica_set._start_watching()
        return replica_set

    def _await_ready(
        self, index: int, owned: EngineProcess | None
    ) -> tuple[ProcessCoreClient, threading.Event]:
        """Reach a replica during startup; waits for one of another machine to listen."""
        while True:
            try:
                return self._reach(index, owned)
            except EngineDead as error:
                if owned is not None:
                    raise
                rank = self._replicas[index].address.rank
                log.warning("waiting for replica %d: %s", rank, error)
                time.sleep(_PATIENCE)

    @classmethod
    def join(
        cls,
        address: str,
        tell: Callable[[ReplicaNews], None],
        died: Callable[[EngineDead], None],
    ) -> ReplicaSet:
        """Connect to the replicas of another front end (`ReplicaSet.address`)."""
        addresses = [Address(*fields) for fields in json.loads(address)]
        replica_set = cls([Replica(one, None, due=0.0) for one in addresses], tell, died)
        replica_set._parent = os.getppid()
        for index in range(len(addresses)):
            with suppress(EngineDead):
                replica_set._attach(index, *replica_set._reach(index, None))
        if not any(replica.up for replica in replica_set._replicas):
            raise EngineDead("the engine has no replica")
        replica_set._start_watching()
        return replica_set

    def _start_watching(self) -> None:
        first = next(r.client for r in self._replicas if r.client is not None)
        self.number = first.number
        self.ranks = tuple(replica.address.rank for replica in self._replicas)
        addresses = [
            [r.address.rank, r.address.where, r.address.secret_file] for r in self._replicas
        ]
        self.address = json.dumps(addresses)
        self._watcher.start()

    @property
    def router(self) -> Router:
        """The router. Raises EngineDead before a replica has started."""
        if self._router is None:
            raise EngineDead("no replica has started yet")
        return self._router

    # Replicas come and go.

    def _reach(
        self, index: int, owned: EngineProcess | None
    ) -> tuple[ProcessCoreClient, threading.Event]:
        """Connect to a replica; returns its client, and an event that is set when it ends."""
        replica, ended = self._replicas[index], threading.Event()
        client = ProcessCoreClient(
            replica.address.where, partial(self._handle_events, index),
            partial(self._handle_death, index, ended), owned, replica.address.secret_file,
        )  # fmt: skip
        client.report, client.weights_changed = self._make_report, self._weights_news
        client.retiring = partial(self.drain, index)
        try:
            if self._router is not None:
                check_alike(self.info, client.info, replica.address.rank)
                self._catch_up(index, client)
                self.weights = common_weights(self._replicas, self.weights, client)
        except BaseException:
            client.close()
            raise
        return client, ended

    def _make_report(self) -> str:
        return self.report()

    def _catch_up(self, index: int, client: ProcessCoreClient) -> None:
        """Load the adapters of the other replicas into a new one, or wait until it has them."""
        replica = self._replicas[index]
        for adapter in self.adapters.values() or replica.adapters:
            if replica.start is not None:
                client.load_adapter(adapter, True).result()
            while adapter.name not in client.adapters and adapter.name in self._common_adapters():
                if self._ended.wait(_LOOK):
                    return
        if replica.start is not None and self.weights.asleep:
            client.sleep(1).result()

    def _attach(self, index: int, client: ProcessCoreClient, ended: threading.Event) -> None:
        """Send requests to a replica from now on."""
        replica = self._replicas[index]
        with self._lock:
            if self._router is None:
                self.info = client.info
                self._shared = client.info.config.parallel.shared_experts
                self._router = make_router(client.info, len(self._replicas))
            replica.client, replica.ended, replica.reason = client, ended, None
            replica.starting, replica.stalled, replica.mute = False, None, False
            replica.since, replica.due, replica.failed = time.monotonic(), None, 0
            replica.up = True
            self._router.enable(index)
        if len(self._replicas) > 1:
            self._cache_events.follow(index, client.info.config, replica.address.where)
        self._tell(ReplicaReady(index))
        if ended.is_set():
            self._handle_death(index, ended, EngineDead("the engine's process is gone"))

    def _handle_death(self, index: int, ended: threading.Event, error: EngineDead) -> None:
        """Restart or fail the sequences of a dead replica. Runs on its client's thread."""
        ended.set()
        replica = self._replicas[index]
        with self._lock:
            if self._ended.is_set() or replica.client is None or replica.ended is not ended:
                return
            indices = [index]
            if self._shared:
                reason = (
                    f"replica {replica.address.rank}: {error}; the others, which share experts "
                )
                error = EngineDead(f"{reason}with it, ended too")
                indices = [at for at, other in enumerate(self._replicas) if other.ended is not None]
            lost = [ReplicaLost(at, self._mark_dead(at, error), error) for at in indices]
            hopeless = self._is_hopeless()
        for at in indices:
            other = self._replicas[at].client
            if at != index and other is not None:
                other.kill()
        if replica.start is not None:
            wait = max((replica.due or 0.0) - time.monotonic(), 0.0)
            who = "all replicas" if self._shared else f"replica {replica.address.rank}"
            log.error("%s: %s; restarting in %.1f s", who, error, wait)
        for one in lost:
            self._tell(one)
        if hopeless:
            self._died(EngineDead(f"it was restarted too often: {error}"))

    def _mark_dead(self, index: int, error: EngineDead) -> tuple[str, ...]:
        """Mark a replica as dead; returns the sequences that it had."""
        replica = self._replicas[index]
        replica.ended = None
        lived = time.monotonic() - replica.since
        replica.up, replica.draining, replica.stalled = False, False, None
        replica.reason = str(error)
        replica.adapters = () if replica.client is None else tuple(replica.client.adapters.values())
        replica.deaths = replica.deaths + 1 if lived < _MOST else 1
        wait = min(_MOST, _BACKOFF * 2 ** (replica.deaths - 1)) if replica.start else _AGAIN
        replica.due = time.monotonic() + wait
        return tuple(self.router.remove(index))

    def _watch(self) -> None:
        """Look after replicas until the end; the body of a thread."""
        before = time.monotonic()
        while not self._ended.wait(_LOOK):
            now = time.monotonic()
            if self._parent is not None and os.getppid() != self._parent:
                self._died(EngineDead("the process that starts replicas is gone"))
                return
            for index, replica in enumerate(self._replicas):
                if replica.up or replica.stalled is not None:
                    if now - before > 2.0 and replica.client is not None:
                        replica.client.forget_silence()  # this process was suspended itself
                    else:
                        self._check(index, replica, now)
                elif replica.due is not None and now >= replica.due and not replica.starting:
                    revive: Callable[[], None] = partial(self._revive, index, replica)
                    replica.starting = True
                    if self._group is not None:
                        revive = partial(self._revive_all, self._group)
                        for other in self._replicas:
                            other.starting, other.up = True, False
                    threading.Thread(target=revive, name="modulm-revive", daemon=True).start()
            before = now

    def _revive(self, index: int, replica: Replica) -> None:
        """Restart or reach a replica again; the body of a thread."""
        process = None
        try:
            if replica.client is not None:
                replica.client.kill()
                replica.client.close()
                replica.client = None
            if replica.start is not None:
                process = replica.start()
            client, ended = self._reach(index, process)
        except Exception as error:
            if process is not None:
                process.kill()
                process.close()
            self._handle_failed_start(replica, error)
            return
        if self._ended.is_set():
            client.close()
            return
        replica.restarts += 1
        log.warning("replica %d is back", replica.address.rank)
        self._attach(index, client, ended)

    def _revive_all(self, group: SharedExperts) -> None:
        """Restart all replicas, because they share experts; the body of a thread."""
        processes: list[EngineProcess] = []
        try:
            for replica in self._replicas:
                if replica.client is not None:
                    replica.client.kill()
                    replica.client.close()
                    replica.client = None
            parts = group.create_folder()
            processes += [replica.start(**parts) for replica in self._replicas if replica.start]
            reached = reach_all(self._reach, processes)
        except Exception as error:
            for process in processes:
                process.kill()
                process.close()
            for replica in self._replicas:
                self._handle_failed_start(replica, error)
            return
        for index, (client, ended) in enumerate(reached):
            if self._ended.is_set():
                client.close()
                continue
            self._replicas[index].restarts += 1
            self._attach(index, client, ended)
        if self._ended.is_set():
            group.close()
        else:
            log.warning("all replicas are back")

    def _handle_failed_start(self, replica: Replica, error: Exception) -> None:
        with self._lock:
            replica.failed += 1
            wait = _AGAIN
            if replica.start is not None:
                replica.reason = f"it does not start: {error}"
                wait = min(_MOST, _BACKOFF * 2**replica.failed)
                log.error("replica %d failed to start: %s", replica.address.rank, error)
            replica.due, replica.starting = time.monotonic() + wait, False
            hopeless = self._is_hopeless()
        if hopeless and not self._ended.is_set():
            self._died(EngineDead(f"no replica starts: {error}"))

    def _is_hopeless(self) -> bool:
        """Whether no replica works, and those started here were restarted often enough."""
        owned = [r for r in self._replicas if r.start is not None]
        return bool(owned) and all(
            not r.up and r.stalled is None and (r.start is None or r.exhausted)
            for r in self._replicas
        )

    def _check(self, index: int, replica: Replica, now: float) -> None:
        """Send no requests to a replica while it is stalled."""
        client = replica.client
        if client is None:
            return
        watchdog = self.info.config.group(WatchdogConfig)
        trouble = client.trouble()
        if trouble is not None and replica.stalled is None:
            error = EngineStalled(f"replica {replica.address.rank} does not respond: {trouble}")
            log.error("%s", error)
            with self._lock:
                replica.up, replica.stalled, replica.reason = False, now, trouble
                self.router.disable(index)
                replica.mute = watchdog.action != "report"
                sequences = self.router.remove(index) if replica.mute else []
            for sequence in sequences:
                client.abort(sequence)
            if watchdog.dump_stacks:
                client.dump_stacks()
            self._tell(ReplicaLost(index, tuple(sequences), error))
        elif trouble is None and replica.stalled is not None:
            log.warning("replica %d responds again", replica.address.rank)
            replica.stalled = None
            with suppress(EngineDead):
                client.is_sleeping().add_done_callback(partial(self._handle_recovery, index))
        elif (
            replica.stalled is not None
            and watchdog.action == "exit"
            and now - replica.stalled >= watchdog.timeout
        ):
            client.kill()

    def _handle_recovery(self, index: int, answer: Future[bool]) -> None:
        """Use a replica again: it has answered, so no more events of lost sequences follow."""
        with self._lock:
            replica = self._replicas[index]
            if answer.exception() is None and replica.client is not None:
                replica.up, replica.mute, replica.reason = True, False, None
                self.router.enable(index)
        self._tell(ReplicaReady(index))

    def _handle_events(self, index: int, events: StepEvents) -> None:
        """Report a replica's step. Runs on its client's thread."""
        if self._replicas[index].mute:
            events = StepEvents(events.time, stats=events.stats)
        following: Sequence[Sequence[Request]] = ()
        with self._lock:
            if (router := self._router) is not None:
                following = router.following(events)
                router.record_tokens(index, events.requests)
                for finish in events.finished:
                    router.record_end(finish.request)
                if (stats := events.stats) is not None:
                    router.record_load(index, stats.running + stats.waiting)
        self._tell(ReplicaEvents(index, events))
        for requests in following:
            try:
                self._send(requests)
            except EngineError as error:
                names = tuple(request.id for request in requests)
                self._tell(ReplicaLost(index, names, error))

    # Called by a rolling restart.

    def drain(self, index: int) -> None:
        """Send a replica no more requests, since it will be restarted; its sequences continue."""
        replica = self._replicas[index]
        with self._lock:
            if replica.up:
                replica.up, replica.draining = False, True
                self.router.disable(index)

    def restart(self, index: int) -> None:
        """Restart the process of a drained replica and wait for it. Any sequences that it got
        meanwhile start again elsewhere.
        """
        replica = self._replicas[index]
        error = EngineDead("the replica was restarted")
        with self._lock:
            if not replica.draining:
                return  # it has died, and is being restarted
            replica.starting = True
            lost = ReplicaLost(index, self._mark_dead(index, error), error)
            replica.deaths = 0
        self._tell(lost)
        self._revive(index, replica)

    # Called by front ends.

    def rolling_restart(self, headless: bool = False) -> None:
        """See `EngineCoreClient`. headless: there are others, on the machine of the front end."""
        if self._shared or (len(self._replicas) < 2 and not headless):
            super().rolling_restart()
        self._rolling.start(headless)

    @property
    def replicas(self) -> Sequence[ReplicaHealth]:
        return tuple(replica.health for replica in self._replicas)

    @property
    def down(self) -> EngineError | None:
        if any(replica.up for replica in self._replicas):
            return None
        reasons = "; ".join(f"replica {h.rank}: {h.reason or h.status}" for h in self.replicas)
        stalled = any(replica.stalled is not None for replica in self._replicas)
        kind = EngineStalled if stalled else EngineRestarting
        return kind(f"no replica accepts requests ({reasons})")

    def replica_index(self, sequences: Sequence[str]) -> int:
        with self._lock:
            return next((i for i in map(self.router.replica, sequences) if i is not None), 0)

    def submit(self, requests: Sequence[Request]) -> None:
        with self._lock:
            first = self.router.first(requests)
        self._send(first)

    def _send(self, requests: Sequence[Request]) -> None:
        """Send the sequences of one request to a replica, another one if it is dead."""
        while True:
            if (error := self.down) is not None:
                raise error
            with self._lock:
                index = self.router.send(requests)
                client = self._replicas[index].client
            try:
                if client is None:
                    raise EngineDead("the engine's process is gone")
                client.submit(requests)
                return
            except EngineDead:
                with self._lock:
                    if self.router.replica(requests[0].id) != index:
                        return  # dead: handled by `ReplicaLost`
                    self.router.disable(index)
                    for request in requests:
                        self.router.record_end(request.id)

    def abort(self, request: str) -> None:
        with self._lock:
            sent = self.router.withdraw(request)
            clients = [(self._replicas[index].client, name) for index, name in sent]
        for client, name in clients:
            if client is not None:
                client.abort(name)

    def _weights_news(self) -> None:
        self.weights = common_weights(self._replicas, self.weights)
        self.weights_changed()

    def trouble(self) -> str | None:
        return trouble_of(self._replicas)

    def forget_silence(self) -> None:
        for _, client in self._available():
            client.forget_silence()

    def give_up(self, error: EngineError) -> None:
        for replica in self._replicas:
            if replica.client is not None:
                replica.client.give_up(error)

    def dump_stacks(self) -> None:
        """Does nothing: stacks were dumped for each replica."""

    def kill(self) -> bool:
        clients = [replica.client for replica in self._replicas if replica.client is not None]
        return sum(client.kill() for client in clients) > 0

    def close(self) -> None:
        with self._lock:
            self._ended.set()
        if self._watcher.is_alive():
            self._watcher.join()
        self._cache_events.close()
        if self._announced is not None:
            self._announced.close()
        if self._group is not None:
            self._group.close()
        close_all(self._replicas)
