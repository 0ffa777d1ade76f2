"""The scheduler with an arithmetic model: what comes out never depends on how it was scheduled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modulm.contracts.requests import Request
from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.engine.scheduling.limits import Limits
from modulm.errors import QueueFull, RequestError
from modulm.testing.engines import check_empty, make_engine
from modulm.testing.fakes import FakeExecutor, Group, Script, reference_tokens

EOS = 1


def request(name: str, prompt: list[int], tokens: int = 8, **fields: object) -> Request:
    params = fields.pop("params", None) or SamplingParams(temperature=0, max_tokens=tokens)
    return Request(id=name, prompt=prompt, params=params, eos=(EOS,), **fields)


def finish_all(engine: object, most: int = 5000) -> int:
    steps = 0
    while engine.tick():
        steps += 1
        assert steps < most, "the engine makes no progress"
    return steps


@st.composite
def workloads(draw: st.DrawFn) -> list[dict[str, object]]:
    """Prompts that often begin alike, of which some arrive late and some are aborted."""
    stem = draw(st.lists(st.integers(8, 60), min_size=1, max_size=40))
    requests = []
    for number in range(draw(st.integers(1, 9))):
        head = stem[: draw(st.integers(0, len(stem)))]
        tail = draw(st.lists(st.integers(8, 60), min_size=0 if head else 1, max_size=12))
        requests.append({
            "name": f"r{number}",
            "prompt": head + tail,
            "tokens": draw(st.integers(1, 14)),
            "late": draw(st.integers(0, 6)),
            "abort": draw(st.one_of(st.none(), st.none(), st.integers(0, 12))),
            "salt": draw(st.sampled_from([None, None, "x"])),
        })  # fmt: skip
    return requests


limits = st.builds(
    Limits,
    rows=st.integers(1, 6),
    tokens=st.integers(6, 80),
    long=st.sampled_from([0, 0, 3, 8]),
    partial=st.sampled_from([None, 1, 2]),
    long_partial=st.sampled_from([None, 1]),
    reserve=st.booleans(),
    spare=st.sampled_from([0.0, 0.1]),
    prefixes=st.booleans(),
    hash=st.sampled_from(["sha256", "builtin"]),
    stages=st.sampled_from([1, 1, 2, 3]),
)
memories = st.sampled_from([
    (Group(4, 100),),
    (Group(4, 22),),
    (Group(4, 40), Group(4, 30, window=9)),
    (Group(8, 20), Group(4, 26, window=6)),
])  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(workloads(), limits, memories, st.integers(1, 3))
def test_tokens_do_not_depend_on_scheduling(
    workload: list[dict[str, object]], bounds: Limits, groups: tuple[Group, ...], depth: int
) -> None:
    """Batch, chunks, prefix hits, preemption, asynchronous steps, arrivals, aborts of others."""
    executor = FakeExecutor(groups, max_model_len=70)
    engine, seen = make_engine(executor, bounds, depth=depth)
    aborted = set()
    step = 0
    waiting = sorted(workload, key=lambda item: item["late"])
    while waiting or engine.busy or any(item["abort"] == step for item in workload):
        while waiting and waiting[0]["late"] <= step:
            item = waiting.pop(0)
            engine.submit(request(item["name"], item["prompt"], item["tokens"], salt=item["salt"]))
        for item in workload:
            if item["abort"] == step and item not in waiting:
                aborted.add(item["name"])
                engine.abort(item["name"])
        engine.tick()
        step += 1
        assert step < 3000, "the engine makes no progress"
    windows = [group.window for group in groups]
    for item in workload:
        got = seen.tokens.get(item["name"], [])
        expected = reference_tokens(item["prompt"], item["tokens"], windows=windows)
        if item["name"] in aborted:
            assert got == expected[: len(got)]
        else:
            assert got == expected
            assert seen.finished[item["name"]].reason == "length"
    check_empty(engine)
    executor.stop()


def test_stages_have_other_rows_each() -> None:
    """While a plan is under way the next one takes rows that it left, and no token is pending."""
    executor = FakeExecutor((Group(4, 100),))
    engine, _ = make_engine(executor, Limits(rows=8, tokens=64, stages=3), depth=3)
    plans = []
    submit = executor.submit
    executor.submit = lambda plan: plans.append(plan) or submit(plan)
    for number in range(6):
        engine.submit(request(f"r{number}", [9 + number, 8], 6))
    finish_all(engine)
    full = [plans[at : at + 3] for at in range(1, len(plans) - 3)]
    assert any([len(plan.rows) for plan in some] == [2, 2, 2] for some in full)
    for some in full:
        rows = [row for plan in some for row in plan.rows.tolist()]
        assert len(set(rows)) == len(rows)
    assert all((plan.tokens >= 0).all() for plan in plans)
    check_empty(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_full_pool_preempts_and_changes_nothing(depth: int) -> None:
    executor = FakeExecutor((Group(4, 17),))
    engine, seen = make_engine(executor, Limits(rows=8, tokens=64, prefixes=False), depth=depth)
    prompts = {f"r{i}": [10 + i] * 8 for i in range(6)}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, 30))
    finish_all(engine)
    assert sum(stats.preempted for stats in seen.stats) > 0
    for name, prompt in prompts.items():
        assert seen.tokens[name] == reference_tokens(prompt, 30)
    check_empty(engine)
    executor.stop()


def test_prefix_hits_are_counted_and_never_cover_the_last_token() -> None:
    executor = FakeExecutor((Group(4, 64),))
    engine, seen = make_engine(executor)
    prompt = list(range(10, 26))
    for name, given_prompt in {"a": prompt, "b": prompt, "c": [*prompt[:9], 99]}.items():
        engine.submit(request(name, given_prompt, 3))
        finish_all(engine)
    assert seen.cached == {"a": 0, "b": 12, "c": 8}
    assert sum(stats.hit for stats in seen.stats) == 20
    assert sum(stats.queried for stats in seen.stats) == 42
    engine.scheduler.forget_prefixes()
    engine.submit(request("d", prompt, 3))
    finish_all(engine)
    assert seen.cached["d"] == 0
    assert seen.tokens["d"] == seen.tokens["a"]
    executor.stop()


def test_blocks_of_old_weights_are_not_found_after_an_update() -> None:
    """Neither those of before, nor those that a running row fills after it on top of them."""
    executor = FakeExecutor((Group(4, 64),))
    engine, seen = make_engine(executor)
    prompt = list(range(10, 26))
    engine.submit(request("a", prompt, 14))
    for _ in range(3):
        engine.tick()
    engine.submit(request("waiting", [*prompt[:8], 99], 1))
    engine.scheduler.forget_prefixes(b"second")
    engine.submit(request("b", prompt, 1))
    finish_all(engine)
    assert seen.cached["b"] == 8  # what the one that waited had computed by then
    engine.submit(request("c", [*prompt, *seen.tokens["a"]], 1))
    finish_all(engine)
    assert seen.cached["c"] == 16
    check_empty(engine)
    executor.stop()


@pytest.mark.parametrize("prefixes", [True, False])
def test_a_burst_with_one_beginning_computes_it_once(prefixes: bool) -> None:
    """Without prefix caching, the choices of one request do."""
    executor = FakeExecutor((Group(4, 64),), keep_plans=True)
    engine, seen = make_engine(executor, Limits(rows=8, tokens=128, prefixes=prefixes))
    params = SamplingParams(temperature=0, n=1 if prefixes else 4, max_tokens=2)
    prompt = list(range(10, 43))
    for number in range(4):
        engine.submit(request(f"r{number}", prompt, params=params, salt="choices"))
    finish_all(engine)
    assert sum(int(plan.counts.sum()) for plan in executor.plans) == 33 + 3 * 1 + 4
    assert [seen.cached[f"r{n}"] for n in range(4)] == [0, 32, 32, 32]
    engine.submit(request("alone", prompt, 2, salt="choices"))
    finish_all(engine)
    assert seen.cached["alone"] == (32 if prefixes else 0)
    check_empty(engine)
    executor.stop()


def test_stops_by_eos_ids_length_and_least_tokens() -> None:
    scripts = {name: Script(tokens=[20, 21, EOS, 22, 23]) for name in "abcd"}
    executor = FakeExecutor(scripts=scripts)
    engine, seen = make_engine(executor)
    base = SamplingParams(temperature=0, max_tokens=5)
    engine.submit(request("a", [9], params=base))
    engine.submit(request("b", [9], params=base.with_(ignore_eos=True)))
    engine.submit(request("c", [9], params=base.with_(stop_token_ids=[30, 21])))
    engine.submit(request("d", [9], params=base.with_(min_tokens=4, stop_token_ids=[22])))
    finish_all(engine)
    assert seen.tokens["a"] == [20, 21, EOS]
    assert (seen.finished["a"].reason, seen.finished["a"].stop) == ("stop", None)
    assert seen.tokens["b"] == [20, 21, EOS, 22, 23]
    assert seen.finished["b"].reason == "length"
    assert (seen.finished["c"].reason, seen.finished["c"].stop) == ("stop", 21)
    assert (seen.tokens["d"][-1], seen.finished["d"].stop) == (22, 22)
    executor.stop()


def test_budget_and_rows_bound_every_step() -> None:
    executor = FakeExecutor((Group(4, 300),), keep_plans=True)
    engine, seen = make_engine(executor, Limits(rows=3, tokens=10))
    for number in range(7):
        engine.submit(request(f"r{number}", [number + 8] * 23, 4))
    finish_all(engine)
    assert max(int(plan.counts.sum()) for plan in executor.plans) == 10
    assert max(len(plan.rows) for plan in executor.plans) == 3
    assert max(stats.waiting for stats in seen.stats) == 6
    executor.stop()


def test_a_long_prompt_lets_short_ones_pass() -> None:
    executor = FakeExecutor((Group(4, 300),))
    bounds = Limits(rows=4, tokens=64, long=8, partial=1, long_partial=1)
    engine, seen = make_engine(executor, bounds)
    engine.submit(request("long", [9] * 60, 1))
    engine.submit(request("longer", [10] * 60, 1))
    engine.submit(request("short", [11] * 4, 1))
    order = []
    while engine.tick():
        order += [name for name in seen.finished if name not in order]
    assert order == ["short", "long", "longer"]
    executor.stop()


def test_whole_prompts_when_chunks_are_off() -> None:
    executor = FakeExecutor((Group(4, 300),), keep_plans=True)
    engine, seen = make_engine(executor, Limits(rows=4, tokens=20, chunked=False))
    engine.submit(request("a", [9] * 12, 3))
    engine.submit(request("b", [10] * 12, 3))
    engine.submit(request("c", [10] * 21, 3))
    finish_all(engine)
    assert all(int(plan.counts.max()) in (1, 12) for plan in executor.plans)
    assert seen.tokens["b"] == reference_tokens([10] * 12, 3)
    assert isinstance(seen.finished["c"].error, RequestError)
    executor.stop()


def test_priority_and_arrival_order_the_queue() -> None:
    from modulm_scheduler_priority import Priority

    executor = FakeExecutor()
    engine, seen = make_engine(executor, Limits(rows=1, tokens=64), Priority())
    for number, priority in enumerate([5, 1, 5, 0]):
        engine.submit(request(f"r{number}", [9] * 3, 2, priority=priority, arrival=float(number)))
    finish_all(engine)
    assert list(seen.finished) == ["r3", "r1", "r0", "r2"]
    executor.stop()


def test_the_queue_is_bounded_by_requests_and_tokens() -> None:
    executor = FakeExecutor()
    engine, _ = make_engine(executor, Limits(rows=2, queued_requests=3, queued_tokens=50))
    for number in range(5):
        engine.submit(request(f"r{number}", [9] * 5))
    with pytest.raises(QueueFull, match="try again"):
        engine.submit(request("late", [9] * 5))
    engine.tick()
    assert (engine.scheduler.running, engine.scheduler.waiting) == (2, 3)
    engine.abort("r4")
    engine.tick()
    with pytest.raises(QueueFull, match="tokens"):
        engine.submit(request("large", [9] * 60))
    engine.submit(request("small", [9] * 5))
    finish_all(engine)
    check_empty(engine)
    executor.stop()


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "no tokens"), ([9] * 256, "room|together"), ([9] * 900, "together")]
)
def test_impossible_prompts_end_with_an_error(prompt: list[int], words: str) -> None:
    executor = FakeExecutor((Group(16, 64),))
    engine, seen = make_engine(executor)
    engine.submit(request("bad", prompt))
    engine.submit(request("good", [9, 9]))
    finish_all(engine)
    assert isinstance(seen.finished["bad"].error, RequestError)
    assert seen.tokens["good"] == reference_tokens([9, 9], 8)
    executor.stop()


def test_a_small_pool_shortens_what_one_request_may_be() -> None:
    executor = FakeExecutor((Group(4, 9),), max_model_len=256)
    engine, seen = make_engine(executor)
    engine.submit(request("a", [9] * 10, 200))
    finish_all(engine)
    assert len(seen.tokens["a"]) == 22
    assert seen.finished["a"].reason == "length"
    check_empty(engine)
    executor.stop()


def test_two_that_fit_only_singly_both_finish() -> None:
    executor = FakeExecutor((Group(4, 11),))
    engine, seen = make_engine(executor, Limits(rows=2, tokens=64))
    for name in "ab":
        engine.submit(request(name, [9, ord(name)], 34))
    steps = finish_all(engine)
    assert steps < 120
    for name in "ab":
        assert seen.tokens[name] == reference_tokens([9, ord(name)], 34)
    executor.stop()


def test_pooling_rows_end_with_their_result() -> None:
    executor = FakeExecutor()
    engine, seen = make_engine(executor, Limits(tokens=8))
    engine.submit(request("embed", [9] * 20, params=PoolingParams()))
    engine.submit(request("text", [9] * 5, 3))
    finish_all(engine)
    pooled = [values for events in seen.steps for values in events.pooled.values()]
    assert len(pooled) == 1
    assert isinstance(pooled[0], np.ndarray)
    assert "embed" not in seen.tokens
    assert seen.finished["embed"].reason == "stop"
    assert seen.tokens["text"] == reference_tokens([9] * 5, 3)
    check_empty(engine)
    executor.stop()


def test_prompt_logprobs_come_with_their_places_in_any_chunks() -> None:
    found = {}
    for tokens in (4, 64):
        executor = FakeExecutor()
        engine, seen = make_engine(executor, Limits(tokens=tokens))
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, logprobs=2)
        engine.submit(request("a", list(range(10, 21)), params=params))
        finish_all(engine)
        places: dict[int, int] = {}
        for events in seen.steps:
            first, entries = events.prompt_logprobs.get("a", (0, ()))
            places |= {first + i: int(entry.ids[0]) for i, entry in enumerate(entries)}
        found[tokens] = places
        assert sum("a" in events.logprobs for events in seen.steps) == 2
        executor.stop()
    assert found[4] == found[64] == {i: 10 + i for i in range(1, 11)}
