"""Simulates pools of prefill and decode replicas beside as many replicas that do both.

    python bench/fleet_pools.py [--replicas 8] [--plots docs/images]

Step times are those of `bench/fleet.py` (STEP, ROW and TOKEN, measured there with `--measure`). A
step computes its rows and at most BUDGET prompt tokens. For each mix of prompt and answer lengths
and each split of the replicas, finds the highest rate of requests at which the goals are met: 99 %
of first tokens within FIRST seconds, and 99 % of the times between two tokens within GAP. Prints
a table, and writes a plot for each mix.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from pathlib import Path

from attrs import define, field, frozen
from fleet import ROW, ROWS, STEP, TOKEN

#: Prompt tokens in a step of a replica that does both (the best one counts), and of one that only
#: computes prompts.
BUDGETS = {"both": (16, 32, 64, 128), "prefill": (512,)}
#: Goals in seconds: first token, and between two tokens.
FIRST, GAP = 30.0, 0.25
#: Seconds to send a token's keys and values after the prompt (112 KiB at 4 GB/s), for the last
#: chunk only, because the others are sent while the next one is computed.
SENT = 0.000028
#: Prompt and answer tokens, on average.
MIXES = {"chat": (256, 128), "documents": (2048, 128), "long answers": (256, 512)}
RATES = [0.02 * 1.25**power for power in range(18)]


@frozen
class Job:
    """A request."""

    at: float
    prompt: int
    answer: int


@define(eq=False)
class Replica:
    """A simulated replica. waiting: (job, prompt tokens left). running: tokens left of answers."""

    budget: int
    now: float = 0.0
    waiting: deque[list[float]] = field(factory=deque)
    running: list[int] = field(factory=list)

    @property
    def load(self) -> float:
        """Seconds of work that a new prompt waits for, about."""
        return sum(left for _, left, _ in self.waiting) * TOKEN + len(self.running) * ROW


def step(replica: Replica, gaps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """Run a step; returns (arrival, answer) of prompts that it completed."""
    left = replica.budget if len(replica.running) < ROWS else 0
    computed, ready = 0.0, []
    while replica.waiting and left > 0:
        head = replica.waiting[0]
        part = min(left, head[1])
        head[1] -= part
        left -= part
        computed += part
        if head[1] > 0:
            break
        at, _, answer = replica.waiting.popleft()
        ready.append((at, int(answer)))
    seconds = STEP + ROW * len(replica.running) + TOKEN * computed
    replica.now += seconds
    if replica.running:
        gaps.append((seconds, len(replica.running)))
        replica.running = [tokens - 1 for tokens in replica.running if tokens > 1]
    return ready


def traffic(mix: str, rate: float, count: int, seed: int) -> list[Job]:
    rng = random.Random(seed)
    prompt, answer = MIXES[mix]
    now, jobs = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        sizes = (max(8, int(mean * rng.lognormvariate(-0.18, 0.6))) for mean in (prompt, answer))
        jobs.append(Job(now, *sizes))
    return jobs


def percentile(weighted: list[tuple[float, int]], share: float) -> float:
    """Return the value below which this share of the weights is."""
    rest = share * sum(weight for _, weight in weighted)
    for value, weight in sorted(weighted):
        rest -= weight
        if rest <= 0:
            return value
    return 0.0


def simulate(jobs: list[Job], prefill: int, replicas: int, budget: int) -> tuple[float, float]:
    """Return the 99th percentiles of first tokens and of gaps. prefill: replicas, 0 for none."""
    fronts = [Replica(budget) for _ in range(prefill or replicas)]
    backs = [Replica(1) for _ in range(replicas - prefill)] if prefill else fronts
    arrivals, handed = deque(jobs), deque[tuple[float, int]]()
    gaps: list[tuple[float, int]] = []
    firsts: list[tuple[float, int]] = []
    everyone = fronts if backs is fronts else [*fronts, *backs]
    while True:
        busy = [each for each in everyone if each.waiting or each.running]
        following = min((each.now for each in busy), default=float("inf"))
        if arrivals and arrivals[0].at <= following:
            job = arrivals.popleft()
            target = min(fronts, key=lambda each: each.load)
            if not (target.waiting or target.running):
                target.now = max(target.now, job.at)
            target.waiting.append([job.at, job.prompt, job.answer])
            continue
        if not busy:
            break
        replica = min(busy, key=lambda each: each.now)
        for at, answer in step(replica, gaps):
            if backs is fronts or replica in backs:
                firsts.append((replica.now - at, 1))
                replica.running.append(answer)
                continue
            handed.append((at, answer))
        while handed:
            at, answer = handed.popleft()
            target = min(backs, key=lambda each: len(each.running) + len(each.waiting))
            arrived = replica.now + SENT * replica.budget
            if not (target.waiting or target.running):
                target.now = max(target.now, arrived)
            target.waiting.append([at, 1, answer])
    return percentile(firsts, 0.99), percentile(gaps, 0.99)


def plot(path: Path, mix: str, lines: dict[str, list[tuple[float, float]]]) -> None:
    """Write a plot of the 99th percentile between tokens over the rate of requests."""
    width, height, left, bottom = 640, 360, 60, 50
    most = max(rate for points in lines.values() for rate, _ in points)
    top = 1.5 * max(GAP, *(gap for points in lines.values() for _, gap in points)) / 1.3
    colors = ("#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#d68910")

    def x(rate: float) -> float:
        return left + rate / most * (width - left - 150)

    def y(gap: float) -> float:
        return height - bottom - gap / top * (height - bottom - 30)

    space, base = "http://www.w3.org/2000/svg", height - bottom
    sizes = f"{MIXES[mix][0]} prompt and {MIXES[mix][1]} answer tokens"
    axis = f"requests per second and replica (0 to {most:.2f})"
    parts = [
        f'<svg xmlns="{space}" viewBox="0 0 {width} {height}">',
        '<g font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="18" font-size="14">{mix}: {sizes}</text>',
        f'<path d="M{left} 30V{height - bottom}H{x(most):.0f}" fill="none" stroke="black"/>',
        f'<text x="{left}" y="{height - 12}">{axis}</text>',
        f'<text x="14" y="{base}" transform="rotate(-90 14 {base})">99 % between tokens, ms</text>',
        f'<path d="M{left} {y(GAP):.1f}H{x(most):.0f}" stroke="gray" stroke-dasharray="4"/>',
        f'<text x="{left - 30}" y="{y(GAP) + 4:.1f}">{GAP * 1000:.0f}</text>',
    ]
    for color, (name, points) in zip(colors, lines.items(), strict=False):
        path_data = " ".join(f"{x(rate):.1f},{y(min(gap, top)):.1f}" for rate, gap in points)
        parts.append(f'<polyline points="{path_data}" fill="none" stroke="{color}"/>')
        row = 40 + 18 * list(lines).index(name)
        parts.append(f'<text x="{width - 140}" y="{row}" fill="{color}">{name}</text>')
    path.write_text("\n".join([*parts, "</g></svg>"]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=list(MIXES))
    parser.add_argument("--plots", type=Path)
    options = parser.parse_args()
    splits = sorted({0, options.replicas // 4, options.replicas // 2, 3 * options.replicas // 4})
    print(f"{options.replicas} replicas; goals: first token {FIRST:g} s, between tokens "
          f"{GAP * 1000:.0f} ms; requests per second and replica that meet them")  # fmt: skip
    names = {split: f"{split} prefill" if split else "colocated" for split in splits}
    print(f"| mix | {' | '.join(names.values())} |")
    print("|---|" + "---:|" * len(names))
    for mix in options.mixes:
        best, lines = [], {}
        for split, name in names.items():
            tries = []
            for budget in BUDGETS["prefill" if split else "both"]:
                points, most = [], 0.0
                for rate in RATES:
                    jobs = traffic(mix, rate * options.replicas, options.requests, options.seed)
                    first, gap = simulate(jobs, split, options.replicas, budget)
                    if first > FIRST:
                        break
                    points.append((rate, gap))
                    most = rate if gap <= GAP else most
                tries.append((most, points))
            most, points = max(tries)
            best.append(f"{most:.2f}")
            if points:
                lines[name] = points
        print(f"| {mix} | {' | '.join(best)} |", flush=True)
        if options.plots and lines:
            file = options.plots / f"disaggregation-{mix.replace(' ', '-')}.svg"
            plot(file, mix, lines)


if __name__ == "__main__":
    main()
