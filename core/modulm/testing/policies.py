"""The contract kit for scheduling policies.

    from modulm.testing.policies import check_policy

    def test_contract():
        check_policy(MyPolicy)

Keys and victims are checked over random requests. Then the policy orders an engine with few rows
and blocks, in which requests are preempted: each must end with the tokens it gets alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from attrs import frozen

from modulm.contracts.policy import Policy
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.scheduling.limits import Limits
from modulm.testing.engines import check_empty, make_engine, run_to_end
from modulm.testing.fakes import FakeExecutor, Group

__all__ = ["check_policy"]

_TENANTS = ("", "first", "second")


@frozen
class _Candidate:
    """A request as policies see it. Frozen, so that a policy that changes it is found."""

    id: str
    tenant: str
    weight: float
    arrival: float
    priority: int
    prompt_len: int


def check_policy(driver: type[Policy]) -> None:
    """Run the kit. Raises AssertionError with what was expected."""
    draw = random.Random(0)
    candidates = [
        _Candidate(
            f"r{number}", draw.choice(_TENANTS), draw.choice([0.5, 1.0, 2.0]), float(number),
            draw.randint(-2, 2), draw.randint(1, 500),
        )
        for number in range(12)
    ]  # fmt: skip
    policy = driver()
    _check_keys(policy, candidates)
    for count in (1, 2, 5, 12):
        _check_victim(policy, candidates[:count])
        _check_displaced(policy, candidates[-1], candidates[:count])
    _check_engine(driver)


def _check_keys(policy: Policy, candidates: Sequence[_Candidate]) -> None:
    keys = [policy.key(candidate) for candidate in candidates]
    for key in keys:
        numbers = key if isinstance(key, tuple) else (key,)
        assert numbers, "key() gave an empty tuple"
        for number in numbers:
            valid = isinstance(number, int | float) and not math.isnan(number)
            assert valid, f"key() gave {key!r}, which is no number and no tuple of numbers"
    kinds = {len(key) if isinstance(key, tuple) else 0 for key in keys}
    assert len(kinds) == 1, "keys of two requests cannot be compared: tuples of different lengths"
    again = [policy.key(candidate) for candidate in candidates]
    assert keys == again, "key() gives different keys for the same request"


def _index(index: object, running: Sequence[_Candidate], method: str) -> None:
    valid = isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(running)
    assert valid, f"{method}() gave {index!r}, which is no index of {len(running)} running requests"


def _check_victim(policy: Policy, running: Sequence[_Candidate]) -> None:
    victim = policy.victim(tuple(running))
    _index(victim, running, "victim")
    assert policy.victim(tuple(running)) == victim, "victim() gives different requests in one state"


def _check_displaced(policy: Policy, waiting: _Candidate, running: Sequence[_Candidate]) -> None:
    index = policy.displaced(waiting, tuple(running))
    if index is not None:
        _index(index, running, "displaced")


def _check_engine(driver: type[Policy]) -> None:
    """Check that everything ends, with the right tokens, when rows and blocks are scarce."""
    draw = random.Random(1)
    requests = [
        Request(
            id=f"r{number}", prompt=[draw.randint(8, 60) for _ in range(draw.randint(2, 40))],
            params=SamplingParams(temperature=0, max_tokens=draw.randint(4, 24)),
            arrival=float(number), priority=draw.randint(-1, 1),
            tenant=draw.choice(_TENANTS), seed=number,
        )
        for number in range(10)
    ]  # fmt: skip
    alone = _run(driver, requests, Limits(rows=16, tokens=512), blocks=256)
    scarce = Limits(rows=3, tokens=24, reserve=False)
    busy = _run(driver, requests, scarce, blocks=14)
    assert alone == busy, "requests get other tokens where they wait and are preempted"


def _run(
    driver: type[Policy], requests: Sequence[Request], limits: Limits, blocks: int
) -> dict[str, list[int]]:
    group = Group(blocks=blocks, block_size=8)
    executor = FakeExecutor([group], max_model_len=80)
    engine, recorder = make_engine(executor, limits, driver())
    try:
        run_to_end(engine, requests, 3000)
        assert recorder.death is None, f"the engine ended: {recorder.death}"
        lost = {request.id for request in requests} - set(recorder.finished)
        assert not lost, f"requests never ended: {', '.join(sorted(lost))}"
        ended = {name: finish.reason for name, finish in recorder.finished.items()}
        wrong = {name: reason for name, reason in ended.items() if reason != "length"}
        assert not wrong, f"requests failed: {wrong}"
        check_empty(engine)
    finally:
        executor.stop()
    return {name: list(tokens) for name, tokens in recorder.tokens.items()}
