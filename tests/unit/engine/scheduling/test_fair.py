"""Fair sharing: tokens follow weights within a quantum, nobody starves, and no token changes."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, count

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import parametrize_sample

from modulm.contracts.executor import Plan
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.core.loop import EngineLoop
from modulm.engine.scheduling.limits import Limits
from modulm.errors import QueueFull
from modulm.testing.engines import ByArrival, check_empty, make_engine
from modulm.testing.fakes import FakeExecutor, Group, reference_tokens
from modulm_scheduler_fair.accounts import divide
from modulm_scheduler_fair.policy import Fair

ROOMY = (Group(4, 4000),)


def request(
    name: str,
    tenant: str = "",
    prompt: int = 5,
    tokens: int = 4,
    weight: float = 1.0,
    late: int = 0,
    priority: int = 0,
) -> Request:
    ids = [8 + (len(name) * 7 + place * 3 + ord(name[-1])) % 50 for place in range(prompt)]
    params = SamplingParams(temperature=0, max_tokens=tokens)
    return Request(
        id=name, prompt=ids, params=params, eos=(1,), arrival=late, tenant=tenant, weight=weight,
        salt=name, priority=priority,
    )  # fmt: skip


def run(engine: EngineLoop, most: int = 4000) -> int:
    """Run until nothing is left; returns the number of steps."""
    for step in range(most):
        if not engine.tick():
            return step
    raise AssertionError("the engine makes no progress")


class Shares:
    """An engine with the fair policy, and the tokens that it charged each tenant."""

    def __init__(self, limits: Limits, groups: tuple[Group, ...] = ROOMY, depth: int = 1) -> None:
        self.policy = Fair(2 * limits.tokens)
        self.executor = FakeExecutor(groups, max_model_len=120, keep_plans=True)
        self.engine, self.seen = make_engine(self.executor, limits, self.policy, depth=depth)
        self.charged: Counter[str] = Counter()
        self.names = [""]
        charge = self.policy.accounts.charge

        def note(tokens: np.ndarray, unmet: np.ndarray) -> None:
            self.charged.update(dict(zip(self.names_of(), tokens.tolist(), strict=True)))
            charge(tokens, unmet)

        self.policy.accounts.charge = note  # type: ignore[method-assign]

    def names_of(self) -> list[str]:
        return list(self.policy.accounts._numbers)

    def backlog(self, tenant: str) -> int:
        """Tokens of the tenant's waiting requests."""
        number = self.policy.accounts.find(tenant)
        return 0 if number is None else int(self.policy.accounts.waiting[number])

    def close(self) -> None:
        run(self.engine)
        check_empty(self.engine)
        plans = self.executor.plans or []
        assert self.charged.total() == sum(int(plan.counts.sum()) for plan in plans)
        self.executor.stop()


tenants = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 1.0, 2.0, 4.0]), st.integers(1, 40), st.integers(1, 12)),
    min_size=2,
    max_size=4,
)
bounds = st.builds(
    Limits,
    rows=st.integers(1, 6),
    tokens=st.integers(8, 40),
    long=st.sampled_from([0, 0, 8]),
    prefixes=st.booleans(),
)


@settings(max_examples=5, deadline=None)
@given(tenants, bounds, st.integers(1, 2), st.integers(0, 12))
@example([(1.0, 40, 1), (1.0, 1, 12)], Limits(rows=1, tokens=8, prefixes=False), 1, 12)
@example([(0.5, 5, 1), (4.0, 3, 1)], Limits(rows=1, tokens=8, prefixes=False), 1, 0)
def test_shares_follow_weights_within_a_quantum(
    kinds: list[tuple[float, int, int]], limits: Limits, depth: int, late: int
) -> None:
    """While all have requests waiting, whatever their sizes, and whenever the last one came.

    A tenant may be ahead by a request besides: one that took the only row runs to its end, and
    one that was displaced is computed again.
    """
    shares = Shares(limits, depth=depth)
    quantum = 2 * limits.tokens
    numbers = count()
    weights = {f"t{index}": kind[0] for index, kind in enumerate(kinds)}
    before: Counter[str] | None = None
    for step in range(70):
        for index, (weight, prompt, tokens) in enumerate(kinds):
            absent = index == len(kinds) - 1 and step < late
            while not absent and shares.backlog(f"t{index}") < 2 * limits.tokens:
                name = f"{index}-{next(numbers)}"
                shares.engine.scheduler.add(request(name, f"t{index}", prompt, tokens, weight))
        shares.engine.tick()
        if step == late:
            before = shares.charged.copy()
        if before is None:
            continue
        got = {name: (shares.charged[name] - before[name]) / weights[name] for name in weights}
        most = quantum + max(prompt + tokens for _, prompt, tokens in kinds)
        for one, other in combinations(weights, 2):
            allowed = most / weights[one] + most / weights[other]
            assert abs(got[one] - got[other]) <= allowed, (step, got)
    shares.close()


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 30), st.integers(1, 14), st.integers(0, 9),
            st.one_of(st.none(), st.none(), st.integers(0, 12)), st.sampled_from([0, 0, 1]),
        ),
        min_size=1, max_size=12,
    ),
    bounds,
    st.sampled_from([(Group(4, 100),), (Group(4, 16),), (Group(4, 40), Group(4, 30, window=9))]),
    st.integers(1, 2),
)  # fmt: skip
def test_tokens_are_those_of_any_other_order(
    workload: list[tuple[str, int, int, int, int | None, int]],
    limits: Limits,
    groups: tuple[Group, ...],
    depth: int,
) -> None:
    """Everybody ends, also in a full cache, and with the tokens of the budget scheduler alone."""
    shares = Shares(limits, groups, depth)
    waiting = sorted(enumerate(workload), key=lambda item: item[1][3])
    requests = {}
    for step in count():
        while waiting and waiting[0][1][3] <= step:
            index, (tenant, prompt, tokens, late, _, priority) = waiting.pop(0)
            requests[index] = request(
                f"{tenant}{index}", tenant, prompt, tokens, late=late, priority=priority
            )
            shares.engine.submit(requests[index])
        for index, sent in requests.items():
            if workload[index][4] == step:
                shares.engine.abort(sent.id)
        if not shares.engine.tick() and not waiting:
            break
        assert step < 3000, "the engine makes no progress"
    windows = [group.window for group in groups]
    for index, sent in requests.items():
        got = shares.seen.tokens.get(sent.id, [])
        wanted = reference_tokens(sent.prompt.tolist(), workload[index][2], windows=windows)
        assert got == (wanted if workload[index][4] is None else wanted[: len(got)])
    shares.close()


def test_one_tenant_alone_uses_everything() -> None:
    """It needs as many steps as without shares, though others have been there before."""
    limits = Limits(rows=4, tokens=32)
    steps = []
    for policy in (ByArrival(), Fair()):
        engine, _ = make_engine(executor := FakeExecutor(ROOMY, max_model_len=120), limits, policy)
        engine.submit(request("first", "other", 30, 30))
        run(engine)
        for index in range(20):
            engine.submit(request(f"r{index}", "one", 5 + 7 * index % 30, 6))
        steps.append(run(engine))
        executor.stop()
    assert steps[0] == steps[1]


@pytest.mark.parametrize("groups", [ROOMY, (Group(4, 24),)])
def test_a_flood_does_not_hold_up_another_tenant(groups: tuple[Group, ...]) -> None:
    """Neither with all the rows, all the blocks, nor a long prompt that is half computed."""
    limits = Limits(rows=2, tokens=16)
    shares = Shares(limits, groups)
    for index in range(12):
        shares.engine.submit(request(f"flood{index}", "flood", 40, 40))
    for _ in range(9):
        shares.engine.tick()
    shares.engine.submit(request("small", "other", 10, 2))
    for _ in range(3):
        shares.engine.tick()
    assert "small" in shares.seen.finished, "its first step is the next, its second the last"
    assert "small" not in {name for name in shares.seen.tokens if name.startswith("flood")}
    shares.close()
    assert len(shares.seen.finished) == 13


def first_token(background: int, depth: int, prompt: int) -> tuple[list[Plan], list[Plan]]:
    """Steps before a request came, and those until it has its first token.

    background: number of requests that run in the background.
    """
    limits = Limits(rows=48, tokens=256, prefixes=False)
    shares = Shares(limits, depth=depth)
    shares.engine.submit(request("before", "other"))
    run(shares.engine)
    for index in range(background):
        shares.engine.submit(
            request(f"line{index}", "batches", 40 + index, 59 - index, priority=1, late=index)
        )
    for _ in range(60):
        shares.engine.tick()
    began = shares.engine.scheduler.gauges().step
    shares.engine.submit(request("asked", "other", prompt))
    while "asked" not in shares.seen.tokens:
        shares.engine.tick()
    # With two steps in flight, one more has been planned by then.
    ended = shares.engine.scheduler.gauges().step - (depth - 1)
    shares.close()
    assert len(shares.seen.finished) == background + 2
    plans = shares.executor.plans or []
    return plans[5:began], plans[began:ended]


@parametrize_sample(("depth", "prompt"), [(1, 30), (2, 30), (2, 100)], every=2)
def test_background_requests_hold_up_no_first_token(depth: int, prompt: int) -> None:
    """With 40 lines of batches running, a first token takes the steps that it takes alone, and
    these compute one token more at most. Prompts of lines have a part of other steps.
    """
    _, alone = first_token(0, depth, prompt)
    before, beside = first_token(40, depth, prompt)
    assert len(beside) == len(alone)
    tokens = [sum(int(plan.counts.sum()) for plan in plans) for plans in (alone, beside)]
    assert tokens[0] == prompt
    assert tokens[1] <= prompt + 1
    assert max(len(plan.rows) for plan in before) > 30
    prompts = [int((plan.counts[plan.counts > 1] - 1).sum()) for plan in before]
    assert 0 < max(prompts) <= 256 // 8


def test_background_requests_progress_beside_others() -> None:
    """Though another request waits for its first token at all times."""
    shares = Shares(Limits(rows=4, tokens=64, prefixes=False))
    for index in range(6):
        shares.engine.submit(request(f"line{index}", "batches", 20, 5, priority=1))
    for index in range(400):
        if sum(name.startswith("line") for name in shares.seen.finished) == 6:
            break
        shares.engine.submit(request(f"asked{index}", "other", 48, 1))
        shares.engine.tick()
    else:
        raise AssertionError("requests in the background starve")
    shares.close()


def test_a_background_request_gives_up_what_others_wait_for() -> None:
    """Its row, or the only slot for an adapter: nothing waits for ever."""
    executor = FakeExecutor(ROOMY, max_model_len=120, adapters=1)
    engine, seen = make_engine(executor, Limits(rows=4, tokens=16), Fair())
    engine.submit(_with_adapter("line", "one", 30, priority=1))
    engine.tick()
    engine.submit(_with_adapter("asked", "two", 3))
    run(engine)
    assert set(seen.finished) == {"line", "asked"}
    check_empty(engine)
    executor.stop()
    shares = Shares(Limits(rows=1, tokens=16, prefixes=False))
    shares.engine.submit(request("long", "same", 20, 60, priority=1))
    shares.engine.tick()
    shares.engine.tick()
    shares.engine.submit(request("short", "same", 10, 1))
    shares.engine.tick()
    shares.engine.tick()
    assert list(shares.seen.finished) == ["short"]
    shares.close()


def test_the_displacing_tenant_pays_for_what_is_computed_again() -> None:
    shares = Shares(Limits(rows=1, tokens=8, prefixes=False))
    shares.engine.submit(request("long", "a", 40, 20))
    for _ in range(8):
        shares.engine.tick()
    before = shares.charged["a"]
    shares.engine.submit(request("short", "b", 3, 2))
    shares.close()
    assert shares.charged["a"] == 40 + 19
    assert shares.charged["b"] == 4 + before, "its own tokens, and those that it undid"


def test_requests_that_cannot_start_hold_up_only_their_tenant() -> None:
    """Fifty requests for an adapter without a slot are ahead of another tenant's."""
    policy = Fair()
    executor = FakeExecutor(ROOMY, max_model_len=120, adapters=1)
    engine, seen = make_engine(executor, Limits(rows=4, tokens=16), policy)
    engine.submit(_with_adapter("x", "one", 40))
    engine.tick()
    for index in range(50):
        engine.submit(_with_adapter(f"y{index}", "two", 1))
    engine.submit(request("plain", "other", 6, 1))
    engine.tick()
    engine.tick()
    assert "plain" in seen.finished
    run(engine)
    assert len(seen.finished) == 52
    check_empty(engine)
    executor.stop()


def _with_adapter(name: str, adapter: str, tokens: int, priority: int = 0) -> Request:
    params = SamplingParams(temperature=0, max_tokens=tokens)
    return Request(
        id=name, prompt=[9, 8, 7], params=params, eos=(1,), adapter=adapter, tenant="adapters",
        priority=priority,
    )  # fmt: skip


def test_each_tenant_has_a_share_of_the_queue() -> None:
    limits = Limits(rows=1, tokens=16, queued_requests=4, queued_tokens=60)
    engine, _ = make_engine(executor := FakeExecutor(ROOMY), limits, Fair())
    refused = _fill(engine, "flood", 9)
    assert refused == 4, "one runs, four wait"
    assert _fill(engine, "other", 3) == 1, "it may have half of the queue"
    assert _fill(engine, "flood", 1) == 1
    run(engine)
    assert _fill(engine, "flood", 5) == 0
    run(engine)
    executor.stop()


def _fill(engine: EngineLoop, tenant: str, requests: int) -> int:
    """Submit requests; returns how many were refused."""
    refused = 0
    for _ in range(requests):
        try:
            engine.submit(request(f"{tenant}{next(_NUMBERS)}", tenant, tokens=40))
            engine.tick()
        except QueueFull:
            refused += 1
    return refused


_NUMBERS = count()


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_budget_raises_the_lowest_levels_first(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    draw = lambda values: np.array(data.draw(st.lists(values, min_size=size, max_size=size)))  # noqa: E731
    demand = draw(st.integers(0, 90))
    budget = data.draw(st.integers(1, 100))
    if demand.sum() <= budget:
        return
    level = draw(st.integers(-100, 100)).astype(float)
    weight = draw(st.sampled_from([0.01, 0.5, 1.0, 3.0, 100.0]))
    least = np.minimum(demand, budget // size)
    tokens = divide(budget, demand, least, level, weight)
    assert tokens.sum() == budget
    assert (tokens >= least).all()
    assert (tokens <= demand).all()
    after = level + tokens / weight
    for one in range(size):  # nobody below another could have had one of its tokens
        for other in np.flatnonzero(tokens > least).tolist():
            if tokens[one] < demand[one]:
                assert after[one] + 1 / weight[one] >= after[other] - 1.001 / weight[other]
