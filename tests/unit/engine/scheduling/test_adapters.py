"""Adapters: no step uses more than there are slots, and nobody waits for ever."""

from __future__ import annotations

import random

import pytest
from attrs import evolve

from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.scheduling.adapter_slots import AdapterSlots
from modulm.engine.scheduling.limits import Limits
from modulm.errors import RequestError
from modulm.testing.engines import check_empty, make_engine
from modulm.testing.fakes import FakeExecutor, Group
from modulm.testing.workloads import Arrival, outcomes, random_workload, run_workload


@pytest.mark.parametrize("depth", [1, 2])
def test_adapters_change_no_token_and_are_in_slots_when_they_run(depth: int) -> None:
    """FakeExecutor fails a step with a row whose adapter is in no slot."""
    for seed in range(40):
        draw = random.Random(seed)
        arrivals, scripts = random_workload(draw)
        groups = (Group(4, draw.choice([22, 100])),)
        plain, expected = make_engine(FakeExecutor(groups, scripts=scripts, max_model_len=70))
        run_workload(plain, arrivals, aborts=False)
        names = [None, "a", "b", "c"]
        adapted = [
            Arrival(evolve(a.request, adapter=draw.choice(names)), a.tick, a.abort)
            for a in arrivals
        ]
        slots = draw.randint(1, 3)
        executor = FakeExecutor(
            groups, scripts=scripts, max_model_len=70, adapters=slots, keep_plans=True
        )
        limits = Limits(rows=draw.randint(1, 6), tokens=draw.randint(6, 80))
        engine, seen = make_engine(executor, limits, depth=depth)
        aborted = run_workload(engine, adapted)
        wanted, got = outcomes(expected), outcomes(seen)
        assert all(got[name] == wanted[name] for name in wanted if name not in aborted)
        assert all(1 <= slot <= slots for plan in executor.plans for slot, _ in plan.adapters)
        check_empty(engine)
        assert not engine.scheduler.adapters._users
        executor.stop()


def test_the_least_recently_used_gives_way() -> None:
    slots = AdapterSlots(2)
    for name in "abab":
        slots.take(name)
        slots.release(name)
    assert slots.given() == ((1, "a"), (2, "b"))
    slots.take("b")
    assert slots.fits("c")
    slots.take("c")
    assert slots.given() == ((1, "c"),)
    assert not slots.fits("a")
    slots.lost(((1, "c"), (2, "x")))
    assert slots.given() == ((1, "c"),)


def test_a_stream_of_one_adapter_does_not_starve_another() -> None:
    executor = FakeExecutor((Group(4, 200),), adapters=1)
    engine, seen = make_engine(executor, Limits(rows=3, tokens=64))

    def ask(name: str, adapter: str | None) -> None:
        params = SamplingParams(temperature=0, max_tokens=4)
        engine.submit(Request(id=name, prompt=[9], params=params, adapter=adapter))

    ask("a0", "a")
    ask("b", "b")
    for step in range(1, 60):
        if "b" in seen.finished:
            break
        ask(f"a{step}", "a")
        ask(f"plain{step}", None)
        engine.tick()
    assert step < 40
    assert len([name for name in seen.finished if name[0] == "a"]) >= 2
    executor.stop()


def test_the_prefix_of_one_adapter_is_none_of_another_and_no_slots_is_an_error() -> None:
    executor = FakeExecutor((Group(4, 64),), adapters=2)
    engine, seen = make_engine(executor)
    params = SamplingParams(temperature=0, max_tokens=1)
    for name, adapter in (("x", "a"), ("y", "b"), ("z", None), ("again", "a")):
        engine.submit(Request(id=name, prompt=[9] * 9, params=params, adapter=adapter))
        while engine.tick():
            pass
    assert seen.cached == {"x": 0, "y": 0, "z": 0, "again": 8}
    executor.stop()
    engine, seen = make_engine(FakeExecutor())
    engine.submit(Request(id="x", prompt=[9], params=params, adapter="a"))
    engine.tick()
    assert isinstance(seen.finished["x"].error, RequestError)
