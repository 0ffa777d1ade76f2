"""Random requests that arrive over time, share prefixes, stop and are aborted; and their
outcomes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from attrs import frozen

from modulm.contracts.requests import Finish, Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.core.loop import EngineLoop
from modulm.errors import EngineError
from modulm.testing.engines import Recorder
from modulm.testing.fakes import Script

__all__ = ["Arrival", "Outcome", "outcomes", "random_workload", "run_workload"]

EOS = 1


@frozen(eq=False)
class Arrival:
    """A request, the tick at which it arrives, and the tick at which it is aborted, if any."""

    request: Request
    tick: int
    abort: int | None = None


@frozen
class Outcome:
    """What a request received: tokens, the ids of each token's logprobs, and how it ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[int, ...], ...]
    reason: str | None
    stop: int | None


def random_workload(
    draw: random.Random, longest: int = 40
) -> tuple[list[Arrival], dict[str, Script]]:
    """Return up to nine requests, and the scripts of those that end by a stop id."""
    stem = [draw.randint(8, 60) for _ in range(draw.randint(1, longest))]
    arrivals, scripts = [], {}
    for number in range(draw.randint(1, 9)):
        head = stem[: draw.randint(0, len(stem))]
        tail = [draw.randint(8, 60) for _ in range(draw.randint(0 if head else 1, 12))]
        params = SamplingParams(
            temperature=draw.choice([0, 0, 1]),
            max_tokens=draw.randint(1, 14),
            min_tokens=draw.choice([0, 0, 1]),
            logprobs=draw.choice([None, 2]),
            stop_token_ids=draw.choice([(), (5,)]),
        )
        name = f"r{number}"
        if draw.random() < 0.4:
            scripts[name] = Script([draw.choice([20, 21, 22, 5, EOS]) for _ in range(8)])
        request = Request(
            id=name, prompt=head + tail, params=params, eos=(EOS,), seed=number,
            arrival=float(number), priority=draw.randint(0, 2),
            salt=draw.choice([None, None, "x"]),
        )  # fmt: skip
        abort = draw.randint(0, 12) if draw.random() < 0.2 else None
        arrivals.append(Arrival(request, draw.randint(0, 6), abort))
    return arrivals, scripts


def run_workload(
    engine: EngineLoop, arrivals: Sequence[Arrival], aborts: bool = True, most: int = 3000
) -> set[str]:
    """Tick until everything has ended; return the names of aborted requests."""
    waiting = sorted(arrivals, key=lambda arrival: arrival.tick)
    aborted: set[str] = set()
    step = 0
    while waiting or engine.busy:
        while waiting and waiting[0].tick <= step:
            engine.submit(waiting.pop(0).request)
        for arrival in arrivals:
            if aborts and arrival.abort == step and arrival not in waiting:
                aborted.add(arrival.request.id)
                engine.abort(arrival.request.id)
        engine.tick()
        step += 1
        if step > most:
            raise EngineError("the engine makes no progress")
    engine.tick()
    return aborted


def outcomes(seen: Recorder) -> Mapping[str, Outcome]:
    """Return the outcome of each request."""
    logprobs: dict[str, list[tuple[int, ...]]] = {}
    for events in seen.steps:
        for name, entries in events.logprobs.items():
            logprobs.setdefault(name, []).extend(tuple(e.ids.tolist()) for e in entries)
    none = Finish("", "abort")
    results = {}
    for name in {*seen.tokens, *seen.finished}:
        finish = seen.finished.get(name, none)
        results[name] = Outcome(
            tuple(seen.tokens.get(name, ())), tuple(logprobs.get(name, ())), finish.reason,
            finish.stop,
        )  # fmt: skip
    return results
