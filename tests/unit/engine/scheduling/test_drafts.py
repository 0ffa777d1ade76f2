"""Drafted tokens change nothing but the number of steps, whatever a drafter proposes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from samples import parametrize_sample

from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.scheduling.limits import Limits
from modulm.testing.engines import ByArrival, check_empty, make_engine
from modulm.testing.fakes import FakeExecutor, Group, Script, reference_tokens
from modulm.testing.workloads import outcomes, random_workload, run_workload

EOS = 1


def right(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    return coming


def wrong(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    return [8 + (token + 1) % 50 for token in coming]


def mixed(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    """Right up to a place that depends on the history, and of any length."""
    good = sum(history) % (len(coming) + 1)
    return [*coming[:good], *wrong(history, coming[good:])][: len(history) % 7]


def adversarial(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    return [
        lambda: [*coming, *range(8, 60)],
        lambda: [*coming[:1], -1, *coming[2:]],
        lambda: [*coming[:2], 512, 10**12],
        lambda: [EOS] * 9,
        lambda: [*coming[:1], EOS, 5],
        list,
    ][len(history) % 6]()


DRAFTERS = [right, wrong, mixed, adversarial]
MEMORIES = [
    (Group(4, 100),),
    (Group(4, 22),),
    (Group(4, 40), Group(4, 30, window=9)),
    (Group(8, 20), Group(4, 26, window=6)),
    (Group(128, 6, state=True),),
    (Group(128, 30, state=True),),
    (Group(8, 24, state=True), Group(4, 60)),
    (Group(8, 90, state=True), Group(4, 40), Group(4, 30, window=9)),
]


#: Each kind of memory begins with another drafter.
CASES = [
    pytest.param(number, DRAFTERS[(number + other) % 4], id=f"{number}-{other}")
    for number in range(len(MEMORIES))
    for other in range(4)
]


@parametrize_sample("depth", [2, 1], every=2)
@parametrize_sample(("number", "drafter"), CASES, every=4)
def test_drafts_change_nothing(number, drafter, depth) -> None:
    groups = MEMORIES[number]
    from modulm_scheduler_priority import Priority

    for seed in range(2):
        draw = random.Random(f"{seed} {drafter.__name__} {depth} {groups}")
        arrivals, scripts = random_workload(draw)
        limits = Limits(
            rows=draw.randint(1, 6), tokens=draw.randint(6, 80), long=draw.choice([0, 0, 3, 8]),
            reserve=draw.random() < 0.5, prefixes=draw.random() < 0.7,
        )  # fmt: skip
        policy = draw.choice([ByArrival(), Priority()])
        plain, expected = make_engine(FakeExecutor(groups, scripts=scripts, max_model_len=100))
        run_workload(plain, arrivals, aborts=False)
        executor = FakeExecutor(
            groups, scripts=scripts, max_model_len=100, keep_plans=True, drafter=drafter,
            drafts=draw.randint(1, 5), stray_drafts=drafter is adversarial,
        )  # fmt: skip
        engine, seen = make_engine(executor, limits, policy, depth)
        aborted = run_workload(engine, arrivals)
        wanted, got = outcomes(expected), outcomes(seen)
        for name, outcome in wanted.items():
            if name in aborted:
                found = got[name].tokens if name in got else ()
                assert found == outcome.tokens[: len(found)]
            else:
                assert got[name] == outcome
        assert all(int(plan.counts.sum()) <= limits.tokens for plan in executor.plans)
        check_empty(engine)
        executor.stop()


def run_one(drafter, tokens=24, depth=1, groups=None, **fields):
    groups = groups or (Group(4, 40),)
    executor = FakeExecutor(groups, drafter=drafter, drafts=3, keep_plans=True, **fields)
    engine, seen = make_engine(executor, depth=depth)
    params = SamplingParams(temperature=0, max_tokens=tokens)
    engine.submit(Request(id="a", prompt=[9, 10, 11], params=params, eos=(EOS,)))
    while engine.tick():
        pass
    check_empty(engine)
    executor.stop()
    return executor, seen


@pytest.mark.parametrize("depth", [1, 2])
def test_right_drafts_save_steps_and_are_counted(depth: int) -> None:
    executor, seen = run_one(right, depth=depth)
    assert seen.tokens["a"] == reference_tokens([9, 10, 11], 24)
    assert len(executor.plans) == 1 + 6  # the prompt, five steps of four tokens, one of three
    assert sum(stats.drafted for stats in seen.stats) == 5 * 3 + 2
    assert sum(stats.accepted for stats in seen.stats) == 5 * 3 + 2
    assert seen.steps[1].requests == ["a"] * 4
    assert [stats.drafts for stats in seen.stats] == [0, 1, 1, 1, 1, 1, 1]
    assert [stats.accepted_at for stats in seen.stats] == [(), *[(1, 1, 1)] * 5, (1, 1)]
    assert [step.drafted for step in seen.steps] == [{}, *[{"a": (3, 3)}] * 5, {"a": (2, 2)}]
    executor, seen = run_one(wrong)
    assert len(executor.plans) == 24
    assert sum(stats.accepted for stats in seen.stats) == 0
    assert {stats.accepted_at for stats in seen.stats} == {()}


def test_drafts_are_counted_by_place() -> None:
    """Three rows whose drafts are right up to different places, and one that is aborted."""
    goods = {9: 3, 10: 1, 11: 0, 12: 2}

    def some(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
        good = goods[history[0]]
        return [*coming[:good], *wrong(history, coming[good:])]

    executor = FakeExecutor(drafter=some, drafts=3)
    engine, seen = make_engine(executor)
    for first in goods:
        params = SamplingParams(temperature=0, max_tokens=20)
        engine.submit(Request(id=str(first), prompt=[first], params=params))
    engine.tick()
    engine.abort("12")
    engine.tick()
    assert seen.steps[-1].drafted == {"9": (3, 3), "10": (3, 1), "11": (3, 0)}
    stats = seen.stats[-1]
    assert (stats.drafts, stats.drafted, stats.accepted) == (3, 9, 4)
    assert stats.accepted_at == (2, 1, 1)
    executor.stop()


def test_a_run_ends_at_a_stop_id_but_not_before_the_least_tokens() -> None:
    scripts = {"a": Script(tokens=[20, EOS, 21, EOS, 22, 23])}
    executor = FakeExecutor(scripts=scripts, drafter=right, drafts=5)
    engine, seen = make_engine(executor)
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=3, logprobs=0)
    engine.submit(Request(id="a", prompt=[9], params=params, eos=(EOS,)))
    while engine.tick():
        pass
    assert seen.tokens["a"] == [20, EOS, 21, EOS]
    assert (seen.finished["a"].reason, seen.finished["a"].stop) == ("stop", None)
    assert len(seen.steps[1].logprobs["a"]) == 3
    executor.stop()


def test_drafts_give_way_to_tokens_of_their_own() -> None:
    """A budget of four for three rows: one draft fits; the prompt that joins leaves none."""
    executor = FakeExecutor(drafter=right, drafts=3, keep_plans=True)
    engine, _ = make_engine(executor, Limits(rows=8, tokens=4))
    for name in "abc":
        params = SamplingParams(temperature=0, max_tokens=20)
        engine.submit(Request(id=name, prompt=[9], params=params))
    engine.tick()
    engine.tick()
    assert executor.plans[1].counts.tolist() == [2, 1, 1]
    assert executor.plans[1].drafted.tolist() == [1, 0, 0]
    engine.submit(Request(id="d", prompt=[9, 9], params=SamplingParams(max_tokens=1)))
    engine.tick()
    assert executor.plans[2].drafted is None
    executor.stop()


def test_states_without_spare_slots_have_no_drafts() -> None:
    executor, seen = run_one(right, groups=(Group(128, 2, state=True),), max_model_len=100)
    assert all(plan.drafted is None for plan in executor.plans)
    assert seen.tokens["a"] == reference_tokens([9, 10, 11], 24)


def test_only_accepted_tokens_are_found_again() -> None:
    """Blocks that hold rejected drafts have no names."""
    executor = FakeExecutor((Group(4, 40),), drafter=wrong, drafts=4)
    engine, seen = make_engine(executor)
    params = SamplingParams(temperature=0, max_tokens=9)
    engine.submit(Request(id="a", prompt=[9, 10, 11], params=params))
    while engine.tick():
        pass
    again = [9, 10, 11, *seen.tokens["a"]]
    engine.submit(Request(id="b", prompt=again, params=params))
    while engine.tick():
        pass
    assert seen.cached["b"] == 8
    assert seen.tokens["b"] == reference_tokens(again, 9)
    executor.stop()


def test_a_result_of_too_many_tokens_is_refused() -> None:
    from modulm.contracts.executor import StepResult
    from modulm.engine.scheduling.scheduler import BudgetScheduler
    from modulm.errors import EngineError

    scheduler = BudgetScheduler(Limits(), FakeExecutor(drafts=2).start(), ByArrival())
    scheduler.add(Request(id="a", prompt=[9], params=SamplingParams()))
    plan = scheduler.plan()
    with pytest.raises(EngineError, match="more tokens than"):
        scheduler.commit(plan, StepResult(0, np.array([9, 9]), np.array([2], dtype=np.int32)))
