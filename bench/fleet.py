"""Simulates the router between replicas: python bench/fleet.py [--replicas N] [--requests N]

Step times are modelled from measurements (STEP below; `--measure CHECKPOINT` measures again): a
fixed time plus a time per row and prompt token. Prompts begin with one of many system prompts and
continue as conversations of several turns, with mixed lengths and random arrivals. Prints for each
policy: time to first token, share of prompt tokens found in a replica's cache, and the cost of
routing. `--policies prefix` runs one of them.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Iterator

import numpy as np
from attrs import define, field, frozen

from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm_fleet.router import Router

#: Seconds per step, per row and per prompt token: Qwen3-0.6B's shape in bf16, one thread (measured
#: on 2026-11-22).
STEP, ROW, TOKEN = 0.0515, 0.0042, 0.0031
#: Tokens per step, rows, and tokens of a cache.
BUDGET, ROWS, CACHE = 512, 32, 40_000
BLOCK = 32
PARAMS = SamplingParams()


@frozen
class Asked:
    """A request. parts: segments of its prompt, each with its end in tokens."""

    at: float
    parts: tuple[tuple[int, int], ...]
    prompt: np.ndarray
    answer: int


@define(eq=False)
class Job:
    """A request on a replica. left: prompt tokens to compute. ends: the step at which it ends."""

    name: str
    at: float
    left: float
    answer: int
    ends: float = 0.0


@define(eq=False)
class Engine:
    """A simulated replica: `clock` counts its steps, `when` is the time of the last one."""

    when: float = 0.0
    clock: float = 0.0
    version: int = 0
    waiting: deque[Job] = field(factory=deque)
    running: list[tuple[float, str, Job]] = field(factory=list)
    cache: OrderedDict[int, int] = field(factory=OrderedDict)
    cached: int = 0

    @property
    def step(self) -> float:
        """Seconds of a step with the current rows."""
        prompt = BUDGET - len(self.running) if self.computes else 0
        return STEP + ROW * len(self.running) + TOKEN * prompt

    @property
    def computes(self) -> bool:
        """Whether a prompt is being computed."""
        return bool(self.waiting) and len(self.running) < ROWS

    def advance(self, now: float) -> None:
        """Run steps until now."""
        steps = (now - self.when) / self.step
        if self.computes:
            self.waiting[0].left -= steps * (BUDGET - len(self.running))
        self.clock += steps
        self.when = now

    def following(self) -> float:
        """The time of the next event here, if no request arrives."""
        steps = self.running[0][0] - self.clock if self.running else float("inf")
        if self.computes:
            steps = min(steps, self.waiting[0].left / (BUDGET - len(self.running)))
        return self.when + max(0.0, steps) * self.step

    def found(self, parts: tuple[tuple[int, int], ...]) -> int:
        """Return the cached tokens of a prompt, and add the prompt to the cache."""
        hit = start = 0
        for name, end in parts:
            if name not in self.cache:
                break
            hit = end
        for name, end in parts:
            if name not in self.cache:
                self.cached += end - start
            self.cache[name] = end - start
            start = end
        for name, _ in reversed(parts):
            self.cache.move_to_end(name)
        while self.cached > CACHE:
            self.cached -= self.cache.popitem(last=False)[1]
        return hit


def traffic(count: int, rate: float, seed: int) -> Iterator[Asked]:
    """Yield requests in order of arrival, `rate` per second."""
    rng = random.Random(seed)
    pool = np.random.default_rng(seed).integers(10, 150_000, 1 << 20)
    systems = [(rng.randrange(1 << 19), rng.choice((64, 256, 512, 1024))) for _ in range(2000)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    open_turns: list[tuple[int, list[tuple[int, int, int]]]] = []
    now, names = 0.0, len(systems)
    for _ in range(count):
        now += rng.expovariate(rate)
        if open_turns and rng.random() < 0.6:
            place = rng.randrange(len(open_turns))
            system, turns = open_turns[place]
        else:
            system, turns = rng.choices(range(len(systems)), weights)[0], []
            place = len(open_turns)
            open_turns.append((system, turns))
        said = min(1500, int(rng.lognormvariate(4.5, 0.8)) + 8)
        turns.append((names, rng.randrange(1 << 19), said))
        names += 1
        if len(turns) > 5 or len(open_turns) > 20_000:
            open_turns[place] = open_turns[-1]
            open_turns.pop()
        start, length = systems[system]
        pieces, parts, end = [pool[start : start + length]], [(system, length)], length
        for name, at, size in turns:
            pieces.append(pool[at : at + size])
            end += size
            parts.append((name, end))
        answer = min(400, int(rng.lognormvariate(3.8, 0.7)) + 1)
        yield Asked(now, tuple(parts), np.concatenate(pieces), answer)


class Choice:
    """A routing policy. `seconds`: its accumulated cost."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.seconds = 0.0

    def send(self, name: str, asked: Asked) -> int:
        raise NotImplementedError

    def gave(self, replica: int, name: str) -> None:
        """Record the first token of a request."""

    def ended(self, replica: int, name: str) -> None:
        """Record the end of a request."""


class AtRandom(Choice):
    def send(self, name: str, asked: Asked) -> int:
        return random.randrange(self.replicas)


class RoundRobin(Choice):
    turn = 0

    def send(self, name: str, asked: Asked) -> int:
        self.turn += 1
        return self.turn % self.replicas


class LeastLoaded(Choice):
    """Chooses the replica with the fewest requests."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.counts = np.zeros(replicas)

    def send(self, name: str, asked: Asked) -> int:
        found = int(self.counts.argmin())
        self.counts[found] += 1
        return found

    def ended(self, replica: int, name: str) -> None:
        self.counts[replica] -= 1


class ByPrefix(Choice):
    """modulm_fleet's router."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.router = Router(replicas, BLOCK, CACHE)

    def send(self, name: str, asked: Asked) -> int:
        request = Request(id=name, prompt=asked.prompt, params=PARAMS)
        began = time.perf_counter()
        found = self.router.send((request,))
        self.seconds += time.perf_counter() - began
        return found

    def gave(self, replica: int, name: str) -> None:
        began = time.perf_counter()
        self.router.record_tokens(replica, (name,))
        self.seconds += time.perf_counter() - began

    def ended(self, replica: int, name: str) -> None:
        began = time.perf_counter()
        self.router.record_end(name)
        self.seconds += time.perf_counter() - began


POLICIES: dict[str, type[Choice]] = {
    "random": AtRandom, "round robin": RoundRobin, "least loaded": LeastLoaded, "prefix": ByPrefix,
}  # fmt: skip


def simulate(choice: Choice, requests: Iterator[Asked]) -> tuple[list[float], float]:
    """Return the seconds to each first token, and the cached share of prompt tokens."""
    engines = [Engine() for _ in range(choice.replicas)]
    events: list[tuple[float, int, int]] = []
    waits: list[float] = []
    hits = tokens = 0

    def plan(place: int) -> None:
        engine = engines[place]
        engine.version += 1
        if engine.running or engine.waiting:
            heapq.heappush(events, (engine.following(), place, engine.version))

    def happen(place: int, now: float) -> None:
        engine = engines[place]
        engine.advance(now)
        while engine.running and engine.running[0][0] <= engine.clock + 1e-9:
            _, name, _ = heapq.heappop(engine.running)
            choice.ended(place, name)
        if engine.computes and engine.waiting[0].left <= 1e-6:
            job = engine.waiting.popleft()
            waits.append(now - job.at)
            choice.gave(place, job.name)
            heapq.heappush(engine.running, (engine.clock + job.answer, job.name, job))
        plan(place)

    def run_until(now: float) -> None:
        while events and events[0][0] <= now:
            when, place, version = heapq.heappop(events)
            if engines[place].version == version:
                happen(place, when)

    for number, asked in enumerate(requests):
        run_until(asked.at)
        name = str(number)
        place = choice.send(name, asked)
        engine = engines[place]
        engine.advance(asked.at)
        found = min(engine.found(asked.parts), len(asked.prompt) - 1)
        hits += found
        tokens += len(asked.prompt)
        engine.waiting.append(Job(name, asked.at, len(asked.prompt) - found, asked.answer))
        plan(place)
    run_until(float("inf"))
    return waits, hits / tokens


def measured(folder: str) -> tuple[float, float, float]:
    """Measure STEP, ROW and TOKEN of a checkpoint on this machine with one thread."""
    from modulm import LLM

    llm = LLM(folder, cpu_threads=1, max_model_len=2048, max_num_seqs=ROWS,
              max_num_batched_tokens=BUDGET, enable_prefix_caching=False,
              speculative="off")  # fmt: skip

    def timed(rows: int, prompt: int, answer: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        given = [{"prompt_token_ids": [9 + row] * prompt} for row in range(rows)]
        began = time.perf_counter()
        llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - began

    timed(1, 8, 2)
    one = (timed(1, 8, 33) - timed(1, 8, 1)) / 32
    many = (timed(ROWS, 8, 17) - timed(ROWS, 8, 1)) / 16
    row = (many - one) / (ROWS - 1)
    token = (timed(1, BUDGET, 1) - timed(1, 64, 1)) / (BUDGET - 64)
    llm.shutdown()
    return one - row, row, token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=0.45, help="requests a second and replica")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--measure", metavar="CHECKPOINT")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.measure:
        print("STEP, ROW, TOKEN = {:.4f}, {:.5f}, {:.5f}".format(*measured(options.measure)))
        return
    print(f"{options.replicas} replicas, {options.requests} requests, "
          f"{options.rate:g} a second and replica")  # fmt: skip
    print("| choice | mean wait, s | median | 99 % | found in caches | router, us a request |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in options.policies:
        random.seed(options.seed)
        choice = POLICIES[name](options.replicas)
        rate = options.rate * options.replicas
        waits, hit = simulate(choice, traffic(options.requests, rate, options.seed))
        waits.sort()
        mean, median = statistics.fmean(waits), waits[len(waits) // 2]
        late = waits[int(len(waits) * 0.99)]
        cost = 1e6 * choice.seconds / options.requests
        shown = f"{cost:.1f}" if cost else ""
        print(f"| {name} | {mean:.3f} | {median:.3f} | {late:.3f} | {hit:.3f} | {shown} |",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
