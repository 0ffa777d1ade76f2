"""The loop when things go wrong, and that nothing is ever left behind."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future

import pytest
from samples import parametrize_sample

from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams, StructuredOutputs
from modulm.engine.scheduling.limits import Limits
from modulm.errors import EngineDead, EngineError, QueueFull, RequestError, RowError
from modulm.testing.engines import check_empty, make_engine
from modulm.testing.fakes import FakeExecutor, Group, Script, reference_tokens


def request(name: str, prompt: list[int], tokens: int = 8, **fields: object) -> Request:
    params = SamplingParams(temperature=0, max_tokens=tokens)
    return Request(id=name, prompt=prompt, params=params, eos=(1,), **fields)


def held(name: str) -> Request:
    """A request whose text is constrained."""
    constraint = StructuredOutputs(regex="a*")
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=constraint)
    return Request(id=name, prompt=[9], params=params, eos=(1,))


def finish_all(engine: object) -> None:
    while engine.tick():
        pass


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at", [0, 3])
def test_one_rows_exception_leaves_the_others_equal(depth: int, at: int) -> None:
    executor = FakeExecutor(
        scripts={"r1": Script(errors={at: "the grammar broke"}), "r2": Script(nan={at})}
    )
    engine, seen = make_engine(executor, depth=depth)
    for number in range(4):
        engine.submit(request(f"r{number}", [9, 10 + number] * 9))
    finish_all(engine)
    for number in (0, 3):
        assert seen.tokens[f"r{number}"] == reference_tokens([9, 10 + number] * 9, 8)
    failed = seen.finished["r1"]
    assert failed.reason == "error"
    assert isinstance(failed.error, RowError)
    assert str(failed.error) == "the grammar broke"
    assert len(seen.tokens.get("r1", [])) == at
    check_empty(engine)
    executor.stop()


def test_blocks_of_a_failing_step_are_not_found_later() -> None:
    executor = FakeExecutor((Group(4, 64),), scripts={"bad": Script(nan={0})})
    engine, seen = make_engine(executor)
    prompt = list(range(10, 30))
    engine.submit(request("bad", prompt))
    finish_all(engine)
    engine.submit(request("good", prompt))
    finish_all(engine)
    assert seen.cached["good"] == 0
    executor.stop()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(depth: int) -> None:
    executor = FakeExecutor(fail_steps={2: RuntimeError("device fell over")})
    engine, seen = make_engine(executor, Limits(rows=2), depth=depth)
    for number in range(4):
        engine.submit(request(f"r{number}", [9, 10 + number]))
    finish_all(engine)
    assert engine.dead is None
    for name in ("r0", "r1"):
        assert isinstance(seen.finished[name].error, EngineError)
        assert "device fell over" in str(seen.finished[name].error)
    for number in (2, 3):
        assert seen.tokens[f"r{number}"] == reference_tokens([9, 10 + number], 8)
    check_empty(engine)
    executor.stop()


def test_an_engine_that_fails_again_and_again_is_dead() -> None:
    executor = FakeExecutor(fail_steps={n: RuntimeError("broken") for n in range(9)})
    notices: list[str] = []
    engine, seen = make_engine(executor, notify=lambda hook, **_: notices.append(hook))
    thread = threading.Thread(target=engine.run)
    thread.start()
    for number in range(3):
        engine.submit(request(f"r{number}", [9]))
        while f"r{number}" not in seen.finished:
            time.sleep(0.001)
    thread.join(300)
    assert not thread.is_alive()
    assert isinstance(seen.death, EngineDead)
    assert "modulm_engine_failed" in notices
    with pytest.raises(EngineDead, match="broken"):
        engine.submit(request("late", [9]))
    executor.stop()


def test_a_bug_in_the_engine_is_reported_and_refuses_calls() -> None:
    executor = FakeExecutor()
    engine, seen = make_engine(executor)
    engine.scheduler.plan = lambda: 1 / 0
    engine.submit(request("a", [9]))
    engine.run()
    assert "division by zero" in str(seen.death)
    with pytest.raises(EngineDead):
        engine.call(lambda: None)
    executor.stop()


def test_notices_tell_who_came_and_went() -> None:
    executor = FakeExecutor()
    told: list[tuple[str, object]] = []
    engine, _ = make_engine(
        executor,
        notify=lambda hook, **given: told.append(
            (hook, given.get("reason") or given.get("request"))
        ),
    )
    engine.submit(request("a", [9], 2))
    finish_all(engine)
    engine.submit(request("b", [9], 9))
    engine.tick()
    engine.abort("b")
    finish_all(engine)
    names = [entry for entry in told if entry[0] != "modulm_step_finished"]
    assert names == [
        ("modulm_request_admitted", "a"),
        ("modulm_request_finished", "length"),
        ("modulm_request_admitted", "b"),
        ("modulm_request_finished", "abort"),
    ]
    assert len(told) - len(names) == 3
    executor.stop()


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    waits: dict[str, Future[None]] = {name: Future() for name in ("slow", "wrong", "dropped")}
    executor = FakeExecutor(compiling=waits)
    engine, seen = make_engine(executor)
    for name in waits:
        engine.submit(held(name))
    engine.submit(request("plain", [9]))
    finish_all(engine)
    assert set(seen.finished) == {"plain"}
    assert engine.busy
    engine.abort("dropped")
    waits["slow"].set_result(None)
    waits["wrong"].set_exception(RequestError("not a regex", "regex"))
    waits["dropped"].set_result(None)
    finish_all(engine)
    assert seen.finished["slow"].reason == "length"
    assert seen.finished["wrong"].error.param == "regex"
    assert "dropped" not in seen.finished
    assert executor.prepared == []
    check_empty(engine)
    executor.stop()


def test_what_was_prepared_is_forgotten_when_the_queue_is_full() -> None:
    class Full(FakeExecutor):
        def prepare(self, request, constraint):
            if request == "second":
                raise QueueFull("too many")
            return super().prepare(request, constraint)

    executor = Full()
    engine, _ = make_engine(executor)
    with pytest.raises(QueueFull):
        engine.submit(held("first"), held("second"))
    assert executor.prepared == []
    assert not engine.busy
    executor.stop()


def test_calls_run_between_steps_and_return_or_raise() -> None:
    executor = FakeExecutor()
    engine, _ = make_engine(executor)
    thread = threading.Thread(target=engine.run)
    thread.start()
    assert engine.call(lambda: threading.current_thread() is thread).result(300)
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 / 0).result(300)
    engine.stop()
    thread.join(300)
    executor.stop()


@pytest.mark.exhaustive
@parametrize_sample("depth", [1, 2], every=2)
def test_soak_of_two_thousand_requests_with_aborts(depth: int, rng: random.Random) -> None:
    """30% are aborted at random times; the pool, the rows and the queue end as they began."""
    executor = FakeExecutor((Group(8, 90), Group(8, 60, window=20)), max_model_len=120)
    engine, seen = make_engine(executor, Limits(rows=16, tokens=96), depth=depth)
    stems = [[rng.randrange(8, 500) for _ in range(40)] for _ in range(5)]
    left, aborting, sent = 2000, [], {}
    while left or engine.busy:
        for _ in range(min(left, rng.choice([0, 0, 1, 4, 9]))):
            name = f"r{left}"
            left -= 1
            stem = rng.choice(stems)
            prompt = [*stem[: rng.randrange(41)], rng.randrange(8, 500)]
            sent[name] = (prompt, rng.randrange(1, 6))
            engine.submit(request(name, *sent[name]))
            if rng.random() < 0.3:
                aborting.append(name)
        while aborting and rng.random() < 0.4:
            engine.abort(aborting.pop(rng.randrange(len(aborting))))
        engine.tick()
    check_empty(engine)
    assert engine.scheduler.cache.usage == 0.0
    engine.scheduler.forget_prefixes()
    assert all(len(group.index) == 0 for group in engine.scheduler.cache.groups)
    whole = [name for name, finish in seen.finished.items() if finish.reason == "length"]
    assert len(whole) > 1300
    for name in rng.sample(whole, 150):
        prompt, tokens = sent[name]
        assert seen.tokens[name] == reference_tokens(prompt, tokens, windows=[None, 20])
    executor.stop()
