"""Host time of the engine per step, with an executor that does nothing.

Measures a step's work outside of the model: planning, commit and events for front ends. Every row
decodes; blocks fill up and are hashed as usual. Run:

    python bench/step_overhead.py [--rows 1 32 256 1024] [--steps 2000] [--block-size 16] [--async]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

import numpy as np

from modulm.contracts.executor import Capacity, GroupCapacity, Plan, StepResult
from modulm.contracts.policy import Policy
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.scheduling.limits import Limits
from modulm.engine.scheduling.scheduler import BudgetScheduler
from modulm.plugins import manager

PROMPT = 128


def scheduler(rows: int, steps: int, block_size: int, policy: Policy) -> BudgetScheduler:
    """A scheduler with `rows` requests that decode for more than `steps` steps."""
    length = PROMPT + steps + 64
    blocks = rows * (length // block_size + 2) + 1
    capacity = Capacity((GroupCapacity("attention", block_size, None, blocks),), 32_000, length + 1)
    made = BudgetScheduler(Limits(rows=rows, tokens=rows * PROMPT), capacity, policy)
    generator = np.random.default_rng(0)
    for index in range(rows):
        params = SamplingParams(temperature=0, max_tokens=steps + 32)
        prompt = generator.integers(10, 30_000, PROMPT)
        made.add(Request(id=f"request-{index}", prompt=prompt, params=params, eos=(2,)))
    return made


def result(plan: Plan) -> StepResult:
    """A model's result, at no cost."""
    return StepResult(plan.step, np.full(int(plan.samples.sum()), 7 + plan.step % 1000))


def measure(rows: int, steps: int, block_size: int, depth: int, policy: Policy) -> list[float]:
    """Measure the microseconds of host time of each step."""
    made = scheduler(rows, steps, block_size, policy)
    flights: deque[tuple[Plan, StepResult]] = deque()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        plan = made.plan()
        middle = time.perf_counter()
        flights.append((plan, result(plan)))
        resumed = time.perf_counter()
        if len(flights) >= depth:
            made.commit(*flights.popleft())
        times.append((middle - began + time.perf_counter() - resumed) * 1e6)
    return times[20:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--async", dest="depth", action="store_const", const=2, default=1)
    options = parser.parse_args()
    policy = manager.current().load("schedulers", "fcfs")()
    print(f"{'rows':>6} {'median us':>10} {'mean us':>10} {'p99 us':>10}")
    for rows in options.rows:
        times = measure(rows, options.steps, options.block_size, options.depth, policy)
        p99 = statistics.quantiles(times, n=100)[98]
        median, mean = statistics.median(times), statistics.fmean(times)
        print(f"{rows:>6} {median:>10.1f} {mean:>10.1f} {p99:>10.1f}")


if __name__ == "__main__":
    main()
