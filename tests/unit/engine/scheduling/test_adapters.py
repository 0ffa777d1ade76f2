"""Adapters: no step uses more than there are slots, and nobody waits for ever."""

from __future__ import annotations

import random

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import parametrize_sample

from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.scheduling.limits import Limits
from modulm.errors import RequestError
from modulm.testing.engines import check_empty, make_engine
from modulm.testing.fakes import FakeExecutor, Group
from modulm.testing.workloads import Arrival, outcomes, random_workload, run_workload
from modulm_adapters.step.planner import AdapterSlots


@parametrize_sample("depth", [2, 1], every=2)
def test_adapters_change_no_token_and_are_in_slots_when_they_run(depth: int) -> None:
    """FakeExecutor fails a step with a row whose adapter is in no slot."""
    for seed in range(20):
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
        assert all(
            1 <= slot <= slots
            for plan in executor.plans
            for slot, _ in plan.parts.get("adapters", ())
        )
        check_empty(engine)
        assert not engine.scheduler.planners["adapters"].slots._users
        executor.stop()


def test_the_least_recently_used_gives_way() -> None:
    slots = AdapterSlots(2)
    for name in "abab":
        slots.take(name)
        slots.release(name)
    assert slots.take_changes() == ((1, "a"), (2, "b"))
    slots.take("b")
    assert slots.fits("c")
    slots.take("c")
    assert slots.take_changes() == ((1, "c"),)
    assert not slots.fits("a")
    slots.restore(((1, "c"), (2, "x")))
    assert slots.take_changes() == ((1, "c"),)


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


ASKED = st.lists(
    st.tuples(
        st.sampled_from([None, *"abcdef"]), st.integers(1, 30), st.integers(1, 12),
        st.integers(0, 6),
    ),
    min_size=1, max_size=30,
)  # fmt: skip


@given(ASKED, st.integers(1, 3), st.integers(1, 6), st.integers(1, 2), st.sampled_from([12, 100]))
@settings(deadline=None, max_examples=15)
def test_no_step_uses_more_than_fit_and_everybody_ends(
    asked: list[tuple[str | None, int, int, int]], slots: int, rows: int, depth: int, blocks: int
) -> None:
    """Requests of (adapter, prompt, answer, ticks until the next one); few blocks: preemption."""
    executor = FakeExecutor((Group(4, blocks),), adapters=slots, keep_plans=True, max_model_len=44)
    limits = Limits(rows=rows, tokens=24)
    engine, seen = make_engine(executor, limits, depth=depth)
    adapters: dict[str, str | None] = {}
    for number, (adapter, prompt, answer, pause) in enumerate(asked):
        name = f"r{number}"
        adapters[name] = adapter
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        request = Request(id=name, prompt=[number % 7 + 1] * prompt, params=params, adapter=adapter)
        engine.submit(request)
        for _ in range(pause):
            engine.tick()
    while engine.tick():
        pass
    assert {end.reason for end in seen.finished.values()} == {"length"}
    assert set(seen.finished) == set(adapters)
    used: dict[int, str | None] = {}
    for plan in executor.plans or []:
        for row in plan.release:
            del used[row]
        used |= {start.row: start.parts.get("adapters") for start in plan.admit}
        assert len({used[row] for row in plan.rows.tolist()} - {None}) <= slots
    check_empty(engine)
    executor.stop()


@given(
    st.integers(1, 3), st.integers(2, 6),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=6),
)  # fmt: skip
@settings(deadline=None, max_examples=10)
def test_nobody_starves_behind_others_that_keep_coming(
    slots: int, rows: int, coming: list[tuple[int, int]]
) -> None:
    """However long others' requests come, as many as there are rows pass one that has no slot.

    coming: (adapter, tokens) of requests, over and over, that always find their adapter's slot.
    """
    executor = FakeExecutor((Group(4, 200),), adapters=slots)
    engine, seen = make_engine(executor, Limits(rows=rows, tokens=64))

    def ask(name: str, adapter: int, tokens: int = 3) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        engine.submit(Request(id=name, prompt=[9], params=params, adapter=str(adapter)))

    for number in range(rows):
        ask(f"before{number}", number % slots, 3 + number)
    engine.tick()
    ask("patient", 9)
    for number in range(100):
        for place, (adapter, tokens) in enumerate(coming):
            ask(f"after{number}.{place}", adapter % slots, tokens)
        engine.tick()
        if "patient" in seen.finished:
            break
    assert "patient" in seen.finished
    order = list(seen.cached)
    assert len([n for n in order[: order.index("patient")] if n.startswith("after")]) <= rows
    while engine.tick():
        pass
    check_empty(engine)
    executor.stop()


def test_slots_of_idle_adapters_are_empty_after_they_were_forgotten() -> None:
    """As sleep forgets what the slots held."""
    slots = AdapterSlots(3)
    for name in "abc":
        slots.take(name)
    slots.release("a")
    slots.take_changes()
    slots.forget()
    slots.take("d")
    assert slots.take_changes() == ((1, "d"),)
    assert not slots.fits("a")


def test_asleep_and_awake_again_adapters_are_put_into_their_slots() -> None:
    executor = FakeExecutor((Group(4, 64),), adapters=2, keep_plans=True)
    engine, _ = make_engine(executor)
    params = SamplingParams(temperature=0, max_tokens=1)
    for name in ("before", "after"):
        engine.submit(Request(id=name, prompt=[9], params=params, adapter="a"))
        while engine.tick():
            pass
        engine.scheduler.forget_prefixes()
    given = [plan.parts["adapters"] for plan in executor.plans or [] if "adapters" in plan.parts]
    assert given == [((1, "a"),), ((1, "a"),)]
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
