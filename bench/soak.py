"""A soak test with a mixed load at twice the capacity: python bench/soak.py --minutes 60

Streams, disconnecting clients, valid and invalid grammars, tools, several prompts, embeddings,
files, batches, stored responses and invalid requests, from twice as many clients as there are rows,
on a cache with half of the blocks needed. Every answer is checked. Prints a line per minute and, at
the end, the requests, the failures, and the servers' resources.

Exits with 0 if nothing acknowledged was lost, memory grew less than --flat per cent after --settle
of the time, and open files and tasks returned to their initial numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from attrs import define, field, frozen
from harness import Client, Held, Lost, Refused, Reply, Server, form, serving

WORDS = (
    "Hello", "weather", "Paris", "Rome", "baker", "river", "count", "story", "name", "time", "red",
    "blue", "green", "seven",
)  # fmt: skip
#: Batches that a server remembers; as many are created before memory is measured.
REMEMBERED = 1_000
#: Concurrent rows, blocks of the cache, and maximum queued requests.
ROWS, BLOCKS, QUEUE = 8, 64, 24
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
BAD_GRAMMARS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"grammar": "root ::= missing"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"structured_outputs": {"json": {"type": "no such type"}}},
)


class Wrong(Exception):
    """An answer is wrong."""


def need(condition: bool, what: str) -> None:
    if not condition:
        raise Wrong(what)


def is_city(text: str) -> bool:
    """Whether a text matches the schema CITY."""
    try:
        return json.loads(text) in ({"city": "Rome"}, {"city": "Paris"})
    except ValueError:
        return False


def good(reply: Reply) -> Any:
    """Return a 200's JSON; a full queue is valid too. Raises Refused or Wrong."""
    if reply.status == 429:
        raise Refused(reply)
    need(reply.status == 200, f"{reply.status}: {reply.body[:300]!r}")
    return reply.json()


@define(eq=False)
class Caller:
    """A client that sends one request after another."""

    chat: Client
    embed: Client
    rng: random.Random

    def _said(self, **fields: Any) -> dict[str, Any]:
        words = self.rng.choices(WORDS, k=self.rng.randrange(1, 60))
        message = {"role": "user", "content": " ".join(words)}
        length = self.rng.randrange(1, 80)
        return {"model": "M", "messages": [message], "max_tokens": length, **fields}

    async def stream(self) -> None:
        last = b""
        body = self._said(stream=True, stream_options={"include_usage": True})
        usage = None
        async for data in self.chat.stream("/v1/chat/completions", body):
            last = data
            if data != b"[DONE]":
                found = json.loads(data)
                if found.get("error", {}).get("code") == "overloaded":
                    raise Refused(Reply(429, data))
                need("error" not in found, f"stream: {found}")
                usage = found.get("usage") or usage
        need(last == b"[DONE]", "a stream that began has no end")
        need(usage is not None, "a stream without its usage")

    async def leave_stream(self) -> None:
        body = self._said(stream=True, max_tokens=400, ignore_eos=True)
        left = self.rng.randrange(1, 12)
        source = self.chat.stream("/v1/chat/completions", body)
        try:
            async for _ in source:
                left -= 1
                if left <= 0:
                    break
        finally:
            await source.aclose()

    async def leave_plain(self) -> None:
        body = self._said(max_tokens=400, ignore_eos=True)
        try:
            async with asyncio.timeout(self.rng.random()):
                await self.chat.ask("POST", "/v1/chat/completions", body)
        except TimeoutError:
            pass

    async def plain(self) -> None:
        found = good(await self.chat.ask("POST", "/v1/chat/completions", self._said(seed=3)))
        need(found["choices"][0]["finish_reason"] in ("stop", "length"), str(found))

    async def several(self) -> None:
        prompts = [" ".join(self.rng.choices(WORDS, k=9)) for _ in range(self.rng.randrange(1, 4))]
        body = {"model": "M", "prompt": prompts, "n": 2, "max_tokens": 9, "logprobs": 2,
                "temperature": 1.0, "seed": 5}  # fmt: skip
        found = good(await self.chat.ask("POST", "/v1/completions", body))
        places = [choice["index"] for choice in found["choices"]]
        need(sorted(places) == list(range(2 * len(prompts))), f"choices {places}")

    async def grammar(self) -> None:
        named = {"name": "city", "schema": CITY}
        asked = self._said(response_format={"type": "json_schema", "json_schema": named})
        found = good(
            await self.chat.ask("POST", "/v1/chat/completions", {**asked, "max_tokens": 60})
        )
        choice = found["choices"][0]
        # The answer may end within the reasoning, which the grammar does not cover.
        if choice["finish_reason"] == "stop" and not choice["message"].get("reasoning"):
            need(is_city(choice["message"]["content"]), str(found))

    async def bad_grammar(self) -> None:
        asked = self._said(**self.rng.choice(BAD_GRAMMARS))
        reply = await self.chat.ask("POST", "/v1/chat/completions", asked)
        need(reply.status in (400, 429), f"a bad grammar: {reply.status} {reply.body[:300]!r}")

    async def tools(self) -> None:
        asked = self._said(tools=[TOOL], tool_choice="required", max_tokens=80)
        found = good(await self.chat.ask("POST", "/v1/chat/completions", asked))
        if found["choices"][0]["finish_reason"] == "tool_calls":
            (call, *_) = found["choices"][0]["message"]["tool_calls"]
            need(is_city(call["function"]["arguments"]), str(found))

    async def embeddings(self) -> None:
        texts = [" ".join(self.rng.choices(WORDS, k=12)) for _ in range(self.rng.randrange(1, 5))]
        found = good(await self.embed.ask("POST", "/v1/embeddings", {"model": "M", "input": texts}))
        need(len(found["data"]) == len(texts), "fewer vectors than texts")

    async def files(self) -> None:
        content = os.urandom(self.rng.randrange(1, 3_000_000))
        kept = good(await self.chat.ask("POST", "/v1/files", *form("noise", content)))
        path = f"/v1/files/{kept['id']}"
        back = await self.chat.ask("GET", f"{path}/content")
        need(back.body == content, "a file came back other than it went in")
        need(good(await self.chat.ask("DELETE", path))["deleted"] is True, "not deleted")

    async def batch(self) -> None:
        count = self.rng.randrange(1, 6)
        lines = [
            json.dumps({"custom_id": f"{place}", "method": "POST", "url": "/v1/chat/completions",
                        "body": self._said(max_tokens=6)})
            for place in range(count)
        ]  # fmt: skip
        content = "\n".join([*lines, "nonsense"]).encode()
        kept = good(await self.chat.ask("POST", "/v1/files", *form("lines", content)))
        asked = {"input_file_id": kept["id"], "endpoint": "/v1/chat/completions",
                 "completion_window": "24h"}  # fmt: skip
        batch = good(await self.chat.ask("POST", "/v1/batches", asked))
        impatient = self.rng.random() < 0.3
        while batch["status"] not in ("completed", "failed", "cancelled"):
            await asyncio.sleep(0.2)
            if impatient:
                await self.chat.ask("POST", f"/v1/batches/{batch['id']}/cancel")
            batch = good(await self.chat.ask("GET", f"/v1/batches/{batch['id']}"))
        need(impatient or batch["status"] == "completed", f"batch: {batch}")
        names: Counter[str] = Counter()
        for identity in (batch["output_file_id"], batch["error_file_id"]):
            if identity is not None:
                records = await self.chat.ask("GET", f"/v1/files/{identity}/content")
                names.update(str(json.loads(r)["custom_id"]) for r in records.body.splitlines())
                await self.chat.ask("DELETE", f"/v1/files/{identity}")
        await self.chat.ask("DELETE", f"/v1/files/{kept['id']}")
        wanted = Counter([*(str(place) for place in range(count)), "None"])
        need(impatient or names == wanted, f"records {names}, not {wanted}")

    async def stored(self) -> None:
        asked = {"model": "M", "input": "Hello", "max_output_tokens": 16}
        kept = good(await self.chat.ask("POST", "/v1/responses", asked))
        path = f"/v1/responses/{kept['id']}"
        need(good(await self.chat.ask("GET", path))["output"] == kept["output"], "another response")
        good(await self.chat.ask("DELETE", path))

    async def anthropic(self) -> None:
        body = {"model": "M", "max_tokens": 12, "messages": [{"role": "user", "content": "Hi"}]}
        found = good(await self.chat.ask("POST", "/v1/messages", body))
        need(found["type"] == "message", str(found))

    async def nonsense(self) -> None:
        noise = self.rng.randbytes(self.rng.randrange(1, 400))
        path = self.rng.choice(
            ("/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/batches")
        )
        reply = await self.chat.ask("POST", path, noise)
        need(400 <= reply.status < 500, f"nonsense: {reply.status}")

    async def look(self) -> None:
        for path in ("/metrics", "/v1/models", "/load", "/v1/files", "/v1/batches"):
            reply = await self.chat.ask("GET", path)
            need(reply.status == 200, f"{path}: {reply.status}")


KINDS: dict[str, tuple[Callable[[Caller], Awaitable[None]], int]] = {
    "streams": (Caller.stream, 30),
    "streams left": (Caller.leave_stream, 15),
    "answers": (Caller.plain, 20),
    "answers left": (Caller.leave_plain, 10),
    "several prompts": (Caller.several, 8),
    "grammars": (Caller.grammar, 10),
    "bad grammars": (Caller.bad_grammar, 5),
    "tools": (Caller.tools, 8),
    "embeddings": (Caller.embeddings, 10),
    "files": (Caller.files, 4),
    "batches": (Caller.batch, 4),
    "responses": (Caller.stored, 5),
    "messages": (Caller.anthropic, 5),
    "nonsense": (Caller.nonsense, 10),
    "looks": (Caller.look, 5),
}


@define(eq=False)
class Tally:
    """Counts of requests and their outcomes."""

    done: Counter[str] = field(factory=Counter)
    full: Counter[str] = field(factory=Counter)
    wrong: Counter[str] = field(factory=Counter)
    examples: list[str] = field(factory=list)

    async def count(self, kind: str, work: Awaitable[None]) -> None:
        try:
            await work
            self.done[kind] += 1
        except Refused as refused:
            if refused.reply.status == 429:
                self.full[kind] += 1
                await asyncio.sleep(0.2)
            else:
                self._wrong(kind, refused)
        except (Wrong, Lost, OSError, ValueError, LookupError) as error:
            self._wrong(kind, error)

    def _wrong(self, kind: str, error: Exception) -> None:
        self.wrong[kind] += 1
        self.examples.append(f"{kind}: {type(error).__name__}: {error}")


@frozen
class Sample:
    """Resources of a server at one time: KiB of each process, `tasks` of its event loop."""

    seconds: float
    held: Held
    parts: tuple[int, ...]
    tasks: int
    names: tuple[str, ...] = ()


@define(eq=False)
class Watched:
    """A server and the history of its resources."""

    name: str
    server: Server
    samples: list[Sample] = field(factory=list)

    def look(self, began: float) -> Sample:
        """Record the resources. Raises SystemExit if a process is gone."""
        told = json.loads(self.server.get("/soak", 30.0)[1] or b"{}")
        if not told:
            raise SystemExit(f"the server of {self.name} does not answer")
        pids = self.server.family()
        held, parts = Held.by(pids), tuple(Held.by([pid]).memory for pid in pids)
        sample = Sample(time.monotonic() - began, held, parts, told["tasks"], tuple(told["names"]))
        self.samples.append(sample)
        return sample

    def grown(self, settled: float) -> float:
        """Growth in per cent of the last tenth after `settled` seconds, compared with the first."""
        later = [sample.held.memory for sample in self.samples if sample.seconds >= settled]
        if len(later) < 2:
            return 0.0
        part = max(1, len(later) // 10)
        first, last = statistics.median(later[:part]), statistics.median(later[-part:])
        return 100.0 * (last - first) / first


async def ask_on(caller: Caller, tally: Tally, names: Sequence[str], end: float) -> None:
    """Send requests until the time is up."""
    weights = [KINDS[name][1] for name in names]
    while time.monotonic() < end:
        kind = caller.rng.choices(names, weights)[0]
        await tally.count(kind, KINDS[kind][0](caller))


async def fill(caller: Caller, batches: int) -> None:
    """Create batches until the server's table of past ones is full.

    The table is bounded, but would take most of an hour to fill during the soak.
    """
    places = asyncio.Semaphore(8)

    async def one() -> None:
        async with places:
            kept = good(await caller.chat.ask("POST", "/v1/files", *form("lines", b"nonsense")))
            asked = {"input_file_id": kept["id"], "endpoint": "/v1/chat/completions",
                     "completion_window": "24h"}  # fmt: skip
            batch = good(await caller.chat.ask("POST", "/v1/batches", asked))
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.05)
                batch = good(await caller.chat.ask("GET", f"/v1/batches/{batch['id']}"))
            for identity in (kept["id"], batch["output_file_id"], batch["error_file_id"]):
                await caller.chat.ask("DELETE", f"/v1/files/{identity}")

    await asyncio.gather(*(one() for _ in range(batches)))


async def every_kind(caller: Caller, tally: Tally) -> None:
    """Send each kind of request once, so that lazily created resources exist before the first
    sample.
    """
    for kind, (ask, _) in KINDS.items():
        await tally.count(kind, ask(caller))


async def quiet(servers: list[Watched]) -> None:
    """Wait until nothing has been running for a moment; leftover requests end by themselves."""
    latest = time.monotonic() + 30
    while time.monotonic() < latest:
        loads = [json.loads(w.server.get("/load", 30)[1])["server_load"] for w in servers]
        if not any(loads):
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(2)


async def soak(
    servers: list[Watched], minutes: float, clients: int, seed: int, kinds: Sequence[str]
) -> tuple[Tally, Any]:
    """Run the traffic; returns the counts, and the servers' samples before and after it."""
    tally = Tally()

    def caller(number: int) -> Caller:
        ports = (Client(watched.server.port) for watched in servers)
        return Caller(*ports, random.Random(seed * 10_000 + number))  # type: ignore[arg-type]

    await every_kind(caller(0), tally)
    if minutes >= 10:
        await fill(caller(0), REMEMBERED)
    await quiet(servers)
    began = time.monotonic()
    before = [watched.look(began) for watched in servers]
    end = began + 60 * minutes
    asking = [
        asyncio.create_task(ask_on(caller(n), tally, kinds, end)) for n in range(1, clients + 1)
    ]
    pause, shown = min(5.0, 60 * minutes / 20), 0.0
    head = "  minute  server        MiB  files  threads  tasks  answered  full  wrong"
    print(head, flush=True)
    while time.monotonic() < end:
        await asyncio.sleep(pause)
        loop = asyncio.get_running_loop()
        for watched in servers:
            await loop.run_in_executor(None, watched.look, began)
        if time.monotonic() - began >= shown:
            shown += 60.0
            for watched in servers:
                print(row(watched, tally), flush=True)
    await asyncio.gather(*asking)
    await quiet(servers)
    after = [
        await rested(watched, first, began) for watched, first in zip(servers, before, strict=True)
    ]
    return tally, list(zip(servers, before, after, strict=True))


async def rested(watched: Watched, before: Sample, began: float) -> Sample:
    """Sample a server once its resources have settled, after at most half a minute."""
    for _ in range(30):
        sample = watched.look(began)
        if sample.held.files <= before.held.files and sample.tasks <= before.tasks:
            break
        await asyncio.sleep(1)
    return sample


def row(watched: Watched, tally: Tally) -> str:
    sample = watched.samples[-1]
    held = sample.held
    parts = "+".join(f"{part / 1024:.0f}" for part in sample.parts)
    return (
        f"  {sample.seconds / 60:6.1f}  {watched.name:6} {parts:>10} {held.files:6d} "
        f"{held.threads:8d} {sample.tasks:6d} {sum(tally.done.values()):9d} "
        f"{sum(tally.full.values()):5d} {sum(tally.wrong.values()):6d}"
    )


def verdict(
    tally: Tally, ends: list[tuple[Watched, Sample, Sample]], settled: float, flat: float
) -> list[str]:
    """List the failed criteria."""
    found = list(tally.examples[:20])
    for watched, before, after in ends:
        grown = watched.grown(settled)
        if grown > flat:
            found.append(f"{watched.name}: memory grew by {grown:.2f} % after {settled:.0f} s")
        if after.held.files > before.held.files:
            found.append(f"{watched.name}: {before.held.files} open files, then {after.held.files}")
        if after.tasks > before.tasks:
            found.append(f"{watched.name}: {before.tasks} tasks, then {after.tasks}: {after.names}")
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            value = watched.server.metric(f"modulm:{gauge}")
            if value:
                found.append(f"{watched.name}: {gauge} is {value} when nothing runs")
    return found


def table(tally: Tally, ends: list[tuple[Watched, Sample, Sample]], settled: float) -> str:
    lines = ["", f"{'kind':18} {'answered':>9} {'full':>6} {'wrong':>6}"]
    lines += [
        f"{kind:18} {tally.done[kind]:9d} {tally.full[kind]:6d} {tally.wrong[kind]:6d}"
        for kind in KINDS
    ]
    lines += ["", f"{'server':8} {'MiB':>13} {'grown':>8} {'files':>11} {'tasks':>9}"]
    for watched, before, after in ends:
        memory = f"{before.held.memory // 1024} -> {after.held.memory // 1024}"
        files = f"{before.held.files} -> {after.held.files}"
        tasks = f"{before.tasks} -> {after.tasks}"
        grown = f"{watched.grown(settled):+.2f} %"
        lines.append(f"{watched.name:8} {memory:>13} {grown:>8} {files:>11} {tasks:>9}")
    return "\n".join(lines)


def main() -> int:
    """Start the servers, run the soak, and print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=1 / 6, help="part of the time (1/6)")
    parser.add_argument("--flat", type=float, default=1.0, help="per cent of growth (1)")
    parser.add_argument("--clients", type=int, default=2 * (ROWS + QUEUE // 2))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    options = parser.parse_args()
    here = {"env": {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}}
    common = ("--middleware", "watched.Tasks", "--cpu-threads", "1")
    with ExitStack() as stack:
        chat = stack.enter_context(serving(
            *common, "--max-num-seqs", str(ROWS), "--num-gpu-blocks-override", str(BLOCKS),
            "--max-num-queued-reqs", str(QUEUE), "--enable-auto-tool-choice",
            "--tool-call-parser", "hermes", **here,
        ))  # fmt: skip
        embed = stack.enter_context(serving(*common, "--runner", "pooling", **here))
        servers = [Watched("chat", chat), Watched("embed", embed)]
        tally, ends = asyncio.run(
            soak(servers, options.minutes, options.clients, options.seed, options.kinds)
        )
        settled = 60 * options.minutes * options.settle
        print(table(tally, ends, settled))
        wrong = verdict(tally, ends, settled, options.flat)
    print("\n".join(["", *wrong] if wrong else ["", "nothing was lost"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
