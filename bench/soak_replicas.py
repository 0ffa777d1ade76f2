"""A soak test of replicas: python bench/soak_replicas.py [--requests 5000] [--replicas 2] [--kills
2]

Streams, plain answers and disconnecting clients, from many clients, while replicas are killed.
Every request must be answered or fail with an error that names the cause. Exits with 0 if so, and
if the server's caches, queues and processes are the same at the end as at the start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter

from attrs import define, field
from harness import Client, Lost, Refused, Server, command_of, family, serving

#: Error codes that are valid while replicas die and queues are full.
SAYS_WHY = frozenset({"replica_died", "engine_stalled", "overloaded"})
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@define(eq=False)
class Soak:
    """Counts of requests and outcomes."""

    client: Client
    rng: random.Random
    ends: Counter[str] = field(factory=Counter)
    wrong: list[str] = field(factory=list)

    async def one(self) -> None:
        """Send one request of a random kind."""
        prompt = [self.rng.randrange(20, 40)] * self.rng.randrange(1, 200)
        length, act = self.rng.randrange(1, 80), self.rng.random()
        body = {"model": "M", "prompt": prompt, "max_tokens": length, "ignore_eos": True}
        try:
            if act < 0.2:
                async with asyncio.timeout(self.rng.random() * 0.1):
                    await self.stream({**body, "max_tokens": 200})
            elif act < 0.6:
                await self.stream(body)
            else:
                await self.plain(body)
        except TimeoutError:
            self.ends["left"] += 1
        except Refused as refused:
            self.failed(refused.reply.body)
        except Lost as lost:
            self.wrong.append(f"lost: {lost}")

    async def stream(self, body: dict[str, object]) -> None:
        last = b""
        async for data in self.client.stream("/v1/completions", {**body, "stream": True}):
            last = data
            if b'"error"' in data:
                self.failed(data)
                return
        if last == b"[DONE]":
            self.ends["streamed"] += 1
        else:
            self.wrong.append(f"a stream ends with {last!r}")

    async def plain(self, body: dict[str, object]) -> None:
        reply = await self.client.ask("POST", "/v1/completions", body)
        if reply.status != 200:
            self.failed(reply.body)
        elif reply.json()["usage"]["completion_tokens"] != body["max_tokens"]:
            self.wrong.append("an answer is too short")
        else:
            self.ends["answered"] += 1

    def failed(self, body: bytes) -> None:
        try:
            code = str(json.loads(body)["error"]["code"])
        except (ValueError, KeyError):
            code = repr(body[:200])
        self.ends[code] += 1
        if code not in SAYS_WHY:
            self.wrong.append(code)


def engines(server: Server) -> list[int]:
    """The process ids of the replicas."""
    return [pid for pid in family(server.process.pid) if "engine_process" in command_of(pid)]


def well(server: Server) -> bool:
    """Whether all replicas work."""
    status, body = server.get("/health")
    return status == 200 and json.loads(body)["status"] == "ok"


async def until_well(server: Server, seconds: float) -> float:
    began = time.monotonic()
    while not await asyncio.to_thread(well, server):
        if time.monotonic() - began > seconds:
            raise SystemExit("a replica did not come back")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


async def soak(server: Server, options: argparse.Namespace) -> Soak:
    found = Soak(Client(server.port), random.Random(options.seed))
    left = options.requests
    due = [options.requests * (kill + 1) // (options.kills + 1) for kill in range(options.kills)]

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await found.one()

    async def killer() -> None:
        for kill, after in enumerate(due):
            while options.requests - left < after:
                await asyncio.sleep(0.02)
            pids = engines(server)
            os.kill(pids[kill % len(pids)], signal.SIGKILL)
            await asyncio.sleep(0.3)
            print(f"killed; all well again after {await until_well(server, 120):.1f} s", flush=True)

    await asyncio.gather(killer(), *(caller() for _ in range(options.clients)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with serving(
        "-dp", str(options.replicas), "--cpu-threads", "1", "--max-num-seqs", "8",
        "--num-gpu-blocks-override", "128", "--max-model-len", "512",
    ) as server:  # fmt: skip
        before = len(family(server.process.pid))
        began = time.monotonic()
        found = asyncio.run(soak(server, options))
        wrong = found.wrong[:20]
        time.sleep(1.0)
        seconds = time.monotonic() - began
        print(f"{options.requests} requests in {seconds:.0f} s: {dict(found.ends)}")
        if sum(found.ends.values()) + len(found.wrong) < options.requests:
            wrong.append("requests were not accounted for")
        wrong += [f"{g} is not 0" for g in GAUGES if server.metric(f"modulm:{g}")]
        if (after := len(family(server.process.pid))) != before:
            wrong.append(f"{before} processes, then {after}")
        pids = family(server.process.pid)
    wrong += [f"{command_of(pid)} is left" for pid in pids if command_of(pid)]
    print("\n".join(wrong) or "nothing was lost")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
