"""KV connectors: blocks that come from and go to another place change no token."""

from __future__ import annotations

import random

import pytest
from samples import parametrize_sample

from modulm.contracts.connector import TransferPlan
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.scheduling.limits import Limits
from modulm.errors import ConfigError
from modulm.testing.connectors import FakeConnector
from modulm.testing.engines import ByArrival, check_empty, make_engine
from modulm.testing.fakes import FakeExecutor, Group, reference_tokens
from modulm.testing.workloads import outcomes, random_workload, run_workload

MEMORIES = [(Group(4, 100),), (Group(4, 24),), (Group(4, 40), Group(4, 34, window=9))]


def engine_on(connector, groups=None, limits=None, depth=1, **fields):
    groups = groups or (Group(4, 64),)
    executor = FakeExecutor(groups, mover=connector.mover(), keep_plans=True, **fields)
    engine, seen = make_engine(executor, limits, None, depth, connector=connector)
    return engine, seen, executor


def ask(engine, name, prompt, tokens=3):
    params = SamplingParams(temperature=0, max_tokens=tokens)
    engine.submit(Request(id=name, prompt=prompt, params=params))


def finish(engine):
    while engine.tick():
        pass
    check_empty(engine)


@parametrize_sample("depth", [2, 1], every=2)
@pytest.mark.parametrize("groups", MEMORIES, ids=range(len(MEMORIES)))
def test_transfers_change_nothing(groups, depth, pytestconfig) -> None:
    """Two engines on one store; delays, failures, an index that hesitates; aborts, preemption."""
    loads, seeds = 0, 5 if pytestconfig.getoption("everything") else 2
    for seed in range(seeds):
        draw = random.Random(f"{seed} {depth} {groups}")
        arrivals, scripts = random_workload(draw)
        plain, expected = make_engine(FakeExecutor(groups, scripts=scripts, max_model_len=70))
        run_workload(plain, arrivals, aborts=False)
        slow, bad, shy = draw.randint(0, 5), draw.randint(2, 9), draw.randint(1, 4)
        connector = FakeConnector(
            delay=lambda i, slow=slow: i * 7 % (slow + 1),
            fails=lambda i, bad=bad: i % bad == 0,
            hesitates=lambda name, asked, shy=shy: asked < len(name) * shy % 3,
        )
        wanted = outcomes(expected)
        for _ in range(2):
            limits = Limits(
                rows=draw.randint(1, 6), tokens=draw.randint(6, 80), reserve=draw.random() < 0.5,
                long=draw.choice([0, 3, 8]), chunked=True,
            )  # fmt: skip
            fields = {"scripts": scripts, "max_model_len": 70}
            engine, seen, executor = engine_on(connector, groups, limits, depth, **fields)
            aborted = run_workload(engine, arrivals)
            got = outcomes(seen)
            for name, outcome in wanted.items():
                if name in aborted:
                    found = got[name].tokens if name in got else ()
                    assert found == outcome.tokens[: len(found)]
                else:
                    assert got[name] == outcome
            check_empty(engine)
            transfers = [
                plan.parts["transfers"] for plan in executor.plans if "transfers" in plan.parts
            ]
            loads += sum(len(transfer.loads) for transfer in transfers)
            executor.stop()
    assert loads > seeds


def test_blocks_come_from_the_other_place_and_are_saved_once() -> None:
    connector = FakeConnector()
    prompt = list(range(10, 31))
    for number in range(3):
        engine, seen, executor = engine_on(connector)
        ask(engine, "a", prompt)
        finish(engine)
        assert seen.cached["a"] == (20 if number else 0)
        assert seen.tokens["a"] == reference_tokens(prompt, 3)
        plans = [plan.parts["transfers"] for plan in executor.plans if "transfers" in plan.parts]
        moved = [len(t.names) for plan in plans for t in (*plan.loads, *plan.saves)]
        assert moved == [5]  # saved by the first, loaded by the others
        executor.stop()
    assert len(connector.store) == 5


def test_others_run_while_a_load_is_under_way_and_no_step_runs_the_row() -> None:
    first = FakeConnector()
    engine, _, executor = engine_on(first)
    ask(engine, "a", [9] * 17)
    finish(engine)
    executor.stop()
    connector = FakeConnector(delay=lambda identity: 6, store=first.store)
    engine, seen, executor = engine_on(connector, limits=Limits(rows=4))
    ask(engine, "slow", [9] * 17)
    ask(engine, "b", [8] * 3, tokens=4)
    finish(engine)
    assert list(seen.finished) == ["b", "slow"]
    assert seen.cached == {"b": 0, "slow": 16}
    assert seen.tokens["slow"] == reference_tokens([9] * 17, 3)
    polls = [plan for plan in executor.plans if not len(plan.rows)]
    assert polls
    assert all(plan.parts["transfers"] == TransferPlan() for plan in polls)
    executor.stop()


def test_a_failed_load_is_computed_and_an_aborted_one_keeps_its_blocks_until_it_ends() -> None:
    first = FakeConnector()
    engine, _, executor = engine_on(first)
    ask(engine, "a", [9] * 17)
    finish(engine)
    executor.stop()
    connector = FakeConnector(lambda identity: 3, lambda identity: identity == 1, store=first.store)
    engine, seen, executor = engine_on(connector)
    ask(engine, "a", [9] * 17)
    finish(engine)
    assert seen.cached["a"] == 0
    assert seen.tokens["a"] == reference_tokens([9] * 17, 3)
    engine.scheduler.forget_prefixes()
    ask(engine, "b", [9] * 17)
    engine.tick()
    engine.abort("b")
    engine.tick()
    assert (engine.scheduler.running, engine.scheduler.cache.groups[0].pool.used) == (0, 4)
    assert engine.busy
    finish(engine)
    executor.stop()


def test_a_step_that_fails_gives_its_transfers_up() -> None:
    connector = FakeConnector()
    executor = FakeExecutor(mover=connector.mover(), fail_steps={1: MemoryError("on purpose")})
    engine, seen = make_engine(executor, connector=connector)
    ask(engine, "a", [9] * 40, tokens=9)
    finish(engine)
    assert seen.finished["a"].reason == "error"
    executor.stop()


def test_a_model_with_one_state_per_sequence_is_refused() -> None:
    executor = FakeExecutor((Group(1 << 20, 9, state=True),))
    with pytest.raises(ConfigError, match="kv_transfer_config"):
        make_engine(executor, None, ByArrival(), connector=FakeConnector())
