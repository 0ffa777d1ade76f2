"""Saves of blocks in the steps that fill them: what other engines load is what was computed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from attrs import evolve
from samples import parametrize_sample

from modulm.contracts.connector import KVMover, TransferPlan, TransferResult
from modulm.contracts.requests import Request
from modulm.engine.scheduling.limits import Limits
from modulm.testing.connectors import FakeConnector
from modulm.testing.engines import check_empty, make_engine
from modulm.testing.fakes import FakeExecutor, Group
from modulm.testing.workloads import outcomes, random_workload, run_workload
from modulm_kv_transfer.remote import LayeredPlan, RemoteIndex

MEMORIES = [(Group(4, 100),), (Group(4, 24),), (Group(4, 40), Group(4, 34, window=9))]


class Index(RemoteIndex):
    """Every request sends its blocks, and loads what is stored."""

    def __init__(self, stored: Mapping[bytes, Any]) -> None:
        self._stored = stored

    def check(self, request: Request) -> None: ...

    def add(self, request: Request) -> None: ...

    def source(self, request: str) -> Any:
        return None

    def answer(self, request: str) -> Mapping[str, Any] | None:
        return None

    def match(self, request: str, names: Sequence[bytes], cached: int) -> int:
        missing = (index for index, name in enumerate(names) if name not in self._stored)
        return next(missing, len(names))


class Mover(KVMover):
    """Copies the blocks of a step when it is committed. `unended`: saves whose step has not ended;
    `early`: how many blocks were named in the steps that fill them.
    """

    def __init__(self, connector: FakeConnector) -> None:
        self._inner = connector.mover()
        self.unended: dict[int, Any] = {}
        self.early = 0
        self._dropped: list[int] = []

    def open(self, caches: Any, *, rank: int = 0, ranks: int = 1) -> None:
        self._inner.open(caches, rank=rank, ranks=ranks)

    def begin(self, plan: TransferPlan) -> None:
        committed: tuple[Any, ...] = ()
        if isinstance(plan, LayeredPlan):
            ended = [self.unended.pop(i, None) for i in plan.committed]
            assert None not in ended
            committed = tuple(ended)
            self._dropped += [i for i in plan.dropped if self.unended.pop(i, None)]
            self.unended |= {transfer.id: transfer for transfer in plan.computing}
            self.early += sum(len(transfer.names) for transfer in plan.computing)
        self._inner.begin(TransferPlan(plan.loads, (*plan.saves, *committed)))

    def ended(self) -> TransferResult:
        dropped, self._dropped = self._dropped, []
        failed = tuple((identity, "its step failed") for identity in dropped)
        result = self._inner.ended()
        return evolve(result, failed=(*result.failed, *failed))


class Connector(FakeConnector):
    def index(self) -> Index:
        return Index(self.store)

    def mover(self) -> Mover:
        return Mover(FakeConnector(self.delay, self.fails, self.hesitates, self.store))


class Executor(FakeExecutor):
    """Tells the planner that movers take blocks while they are computed."""

    def start(self, config: Any = None) -> Any:
        capacity = super().start(config)
        return evolve(capacity, parts={**capacity.parts, "transfers": {"remote": 1, "layers": 1}})


@parametrize_sample("depth", [2, 1], every=2)
@pytest.mark.parametrize("groups", MEMORIES, ids=range(len(MEMORIES)))
def test_what_is_saved_early_is_what_was_computed(groups: Any, depth: int) -> None:
    """Delays, failures, a step that raises; aborts, preemption: then another engine loads."""
    early = loads = 0
    for seed in range(4):
        draw = random.Random(f"{seed} {depth} {groups}")
        arrivals, scripts = random_workload(draw)
        plain, expected = make_engine(FakeExecutor(groups, scripts=scripts, max_model_len=70))
        run_workload(plain, arrivals, aborts=False)
        wanted = outcomes(expected)
        slow, bad = draw.randint(0, 5), draw.randint(2, 9)
        connector = Connector(
            delay=lambda i, slow=slow: i * 7 % (slow + 1), fails=lambda i, bad=bad: i % bad == 0
        )
        broken = {draw.randint(0, 6): MemoryError("on purpose")} if seed % 2 else {}
        for fail_steps in (broken, {}):
            limits = Limits(
                rows=draw.randint(1, 6), tokens=draw.randint(6, 80), reserve=draw.random() < 0.5,
                long=draw.choice([0, 3, 8]), chunked=True,
            )  # fmt: skip
            mover = connector.mover()
            executor = Executor(
                groups, mover=mover, keep_plans=True, scripts=scripts, max_model_len=70,
                fail_steps=fail_steps,
            )  # fmt: skip
            engine, seen = make_engine(executor, limits, None, depth, connector=connector)
            aborted = run_workload(engine, arrivals)
            got = outcomes(seen)
            for name, outcome in wanted.items():
                found = got[name].tokens if name in got else ()
                assert found == outcome.tokens[: len(found)]
                if not fail_steps and name not in aborted:
                    assert got[name] == outcome
            check_empty(engine)
            assert not mover.unended
            assert not engine.scheduler.planners["transfers"].busy
            plans = [
                plan.parts["transfers"] for plan in executor.plans if "transfers" in plan.parts
            ]
            loads += sum(len(transfer.names) for plan in plans for transfer in plan.loads)
            early += mover.early
            executor.stop()
    assert early > 20
    assert loads > 10
