"""A soak test with a mixed load at twice the capacity: python bench/soak.py --minutes 60 --kills 6

Streams, disconnecting clients, valid and invalid grammars, tools, several prompts, embeddings,
images, adapters that are loaded and unloaded, files, batches, stored responses and invalid
requests, from twice as many clients as there are rows, on a cache with half of the blocks needed.
Every answer is checked. `--kills` ends the engines of the first and the last server, which have
`--restart`, that many times. Prints a line per minute and, at the end, the requests, the failures,
and the servers' resources. `--pause` spares the machine: seconds that a client waits between
requests. A request that takes longer than `--patience` seconds counts as wrong: it hangs.

Exits with 0 if nothing acknowledged was lost, memory grew less than --flat per cent after --settle
of the time, open files, processes, temporary files and tasks returned to their initial numbers, and
nothing of the servers is in /dev/shm or their temporary folder after they have ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import define, field, frozen
from harness import STARTING, Client, Held, Lost, Refused, Server, form, serving, shared_files
from soak_kinds import CUT, KINDS, Caller, Cut, Wrong, good
from soak_models import write_adapters, write_llava

#: Batches that a server remembers; as many are created before memory is measured.
REMEMBERED = 1_000
#: Concurrent rows, blocks of the cache, and maximum queued requests.
ROWS, BLOCKS, QUEUE = 8, 64, 24


@define(eq=False)
class Tally:
    """Counts of requests and their outcomes."""

    #: Seconds that a request may take.
    patience: float = 600.0
    done: Counter[str] = field(factory=Counter)
    full: Counter[str] = field(factory=Counter)
    cut: Counter[str] = field(factory=Counter)
    wrong: Counter[str] = field(factory=Counter)
    examples: list[str] = field(factory=list)
    #: How often an engine was killed, and the seconds until its server was well again.
    kills: list[float] = field(factory=list)

    async def count(self, kind: str, work: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self.patience):
                await work
            self.done[kind] += 1
        except TimeoutError:
            self._wrong(kind, TimeoutError(f"no end within {self.patience:.0f} s"))
        except Refused as refused:
            if refused.reply.status == 429:
                self.full[kind] += 1
                await asyncio.sleep(0.2)
            else:
                await self._count_cut(kind, refused)
        except Cut as error:
            await self._count_cut(kind, error)
        except (Wrong, Lost, OSError, ValueError, LookupError) as error:
            self._wrong(kind, error)

    async def _count_cut(self, kind: str, error: Refused | Cut) -> None:
        """Count a request that an engine's death ended; wrong if no engine was killed."""
        code = str(error) if isinstance(error, Cut) else error.reply.json()["error"]["code"]
        if not self.kills or code not in CUT:
            self._wrong(kind, error)
            return
        self.cut[kind] += 1
        await asyncio.sleep(0.5)

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
    #: Files in the server's temporary folder, without those that clients store there.
    temporary: int = 0


@define(eq=False)
class Watched:
    """A server and the history of its resources."""

    name: str
    server: Server
    folder: Path
    #: Files in /dev/shm that its processes mapped at some time.
    shared: set[str] = field(factory=set)
    samples: list[Sample] = field(factory=list)

    def look(self, began: float) -> Sample:
        """Record the resources. Raises SystemExit if a process is gone."""
        told = json.loads(self.server.get("/soak", STARTING)[1] or b"{}")
        if not told:
            raise SystemExit(f"the server of {self.name} does not answer")
        pids = self.server.family()
        self.shared |= shared_files(pids)
        held, parts = Held.by(pids), tuple(Held.by([pid]).memory for pid in pids)
        sample = Sample(
            time.monotonic() - began, held, parts, told["tasks"], tuple(told["names"]),
            len(self.own_files()),
        )  # fmt: skip
        self.samples.append(sample)
        return sample

    def temporary_files(self) -> list[str]:
        """The files in the server's temporary folder."""
        return [str(path) for path in self.folder.rglob("*") if not path.is_dir()]

    def own_files(self) -> list[str]:
        """Those without what clients have stored, such as batches, which are never deleted."""
        return [path for path in self.temporary_files() if "/modulm-files-" not in path]

    def grown(self, settled: float) -> float:
        """Growth in per cent of the last tenth after `settled` seconds, compared with the first."""
        later = [sample.held.memory for sample in self.samples if sample.seconds >= settled]
        if len(later) < 2:
            return 0.0
        part = max(1, len(later) // 10)
        first, last = statistics.median(later[:part]), statistics.median(later[-part:])
        return 100.0 * (last - first) / first


async def ask_on(
    caller: Caller, tally: Tally, names: Sequence[str], end: float, pause: float
) -> None:
    """Send requests until the time is up."""
    weights = [KINDS[name][1] for name in names]
    while time.monotonic() < end:
        await asyncio.sleep(2 * pause * caller.rng.random())
        kind = caller.rng.choices(names, weights)[0]
        await tally.count(kind, KINDS[kind][0](caller))


async def fill(caller: Caller, batches: int) -> None:
    """Create batches: the server's table of past ones is bounded, but would take most of an hour
    to fill during the soak.
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


async def kill_on(watched: Watched, tally: Tally, minutes: float, kills: int) -> None:
    """Kill the server's engine `kills` times, evenly over the middle of the time."""
    server = watched.server
    for restarts in range(1, kills + 1):
        await asyncio.sleep(60 * minutes / (kills + 1))
        died, place = time.monotonic(), len(tally.kills)
        tally.kills.append(0.0)
        os.kill(server.part("engine_process"), signal.SIGKILL)
        while True:
            status, body = await asyncio.to_thread(server.get, "/health", 60.0)
            if status == 200 and json.loads(body)["replicas"][0]["restarts"] == restarts:
                break
            if time.monotonic() - died > STARTING:
                raise SystemExit(f"the engine of {watched.name} did not come back")
            await asyncio.sleep(0.1)
        seconds = time.monotonic() - died
        tally.kills[place] = seconds
        print(f"  engine of {watched.name} killed; well after {seconds:.1f} s", flush=True)


async def quiet(servers: list[Watched]) -> None:
    """Wait until nothing has been running for a moment; leftover requests end by themselves."""
    latest = time.monotonic() + STARTING
    while time.monotonic() < latest:
        loads = [json.loads(w.server.get("/load", STARTING)[1])["server_load"] for w in servers]
        if not any(loads):
            break
        await asyncio.sleep(0.2)
    await asyncio.sleep(2)


async def soak(
    servers: list[Watched], adapters: dict[str, Path], options: argparse.Namespace
) -> tuple[Tally, Any]:
    """Run the traffic; returns the counts, and the servers' samples before and after it."""
    tally, minutes = Tally(options.patience), options.minutes

    def caller(number: int) -> Caller:
        chat, embed, media = (Client(watched.server.port) for watched in servers)
        rng = random.Random(options.seed * 10_000 + number)
        return Caller(chat, embed, media, rng, adapters, number)

    await every_kind(caller(0), tally)
    filled = (REMEMBERED if minutes >= 10 else 0) if options.filled is None else options.filled
    await fill(caller(0), filled)
    await quiet(servers)
    if options.until is not None:
        minutes = options.minutes = (options.until - time.time()) / 60
    began = time.monotonic()
    before = [watched.look(began) for watched in servers]
    end = began + 60 * minutes
    asking = [
        asyncio.create_task(ask_on(caller(n), tally, options.kinds, end, options.pause))
        for n in range(1, options.clients + 1)
    ]
    asking += [
        asyncio.create_task(kill_on(watched, tally, minutes, options.kills))
        for watched in (servers[0], servers[-1])
    ]
    pause, shown = min(15.0, 60 * minutes / 20), 0.0
    head = "  minute  server        MiB  files  threads  tasks  answered  full   cut  wrong"
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
        f"{sum(tally.full.values()):5d} {sum(tally.cut.values()):5d} {sum(tally.wrong.values()):6d}"
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
        if len(after.parts) > len(before.parts):
            found.append(f"{watched.name}: {len(before.parts)} processes, {len(after.parts)} later")
        if after.temporary > before.temporary:
            found.append(f"{watched.name}: {before.temporary} temporary files, then "
                         f"{after.temporary}: {watched.own_files()[:20]}")  # fmt: skip
        if after.tasks > before.tasks:
            found.append(f"{watched.name}: {before.tasks} tasks, then {after.tasks}: {after.names}")
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            value = watched.server.metric(f"modulm:{gauge}")
            if value:
                found.append(f"{watched.name}: {gauge} is {value} when nothing runs")
    return found


def left_over(servers: list[Watched]) -> list[str]:
    """Describe what servers that have ended left in /dev/shm and in their temporary folders."""
    found = []
    for watched in servers:
        shared = sorted(file for file in watched.shared if Path(file).exists())
        found += [f"{watched.name} left {file}" for file in [*shared, *watched.temporary_files()]]
    return found


def table(tally: Tally, ends: list[tuple[Watched, Sample, Sample]], settled: float) -> str:
    lines = ["", f"{'kind':18} {'answered':>9} {'full':>6} {'cut':>6} {'wrong':>6}"]
    lines += [
        f"{kind:18} {tally.done[kind]:9d} {tally.full[kind]:6d} {tally.cut[kind]:6d} "
        f"{tally.wrong[kind]:6d}"
        for kind in KINDS
    ]
    lines += ["", f"engine killed {len(tally.kills)} times; seconds until the server was well: "
              + (", ".join(f"{seconds:.1f}" for seconds in tally.kills) or "-")]  # fmt: skip
    lines += [
        "",
        f"{'server':8} {'MiB':>13} {'grown':>8} {'files':>11} {'processes':>9} {'tasks':>9}",
    ]
    for watched, before, after in ends:
        memory = f"{before.held.memory // 1024} -> {after.held.memory // 1024}"
        files = f"{before.held.files} -> {after.held.files}"
        tasks = f"{before.tasks} -> {after.tasks}"
        grown = f"{watched.grown(settled):+.2f} %"
        parts = f"{len(before.parts)} -> {len(after.parts)}"
        line = f"{watched.name:8} {memory:>13} {grown:>8} {files:>11} {parts:>9} {tasks:>9}"
        lines.append(f"{line}  /dev/shm: {len(watched.shared)} mapped; temporary files: "
                     f"{before.temporary} -> {after.temporary}")  # fmt: skip
    return "\n".join(lines)


def clock(text: str) -> float:
    """The next time, in seconds of Unix time, at which a clock shows HH:MM in UTC."""
    hours, _, minutes = text.partition(":")
    day = 86_400.0
    return time.time() + (60.0 * (60 * int(hours) + int(minutes)) - time.time()) % day


def start(stack: ExitStack, folder: Path, llava: Path) -> list[Watched]:
    """Start the servers for chat, embeddings, and media; each has a temporary folder of its own."""
    common = ("--middleware", "watched.Tasks", "--cpu-threads", "1")
    loads = (
        "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "8", "--restart",
        "--allow-runtime-lora-updating", "--allowed-lora-path", str(folder),
        "--max-num-seqs", str(ROWS), "--num-gpu-blocks-override", str(BLOCKS),
    )  # fmt: skip
    flags: dict[str, tuple[str, tuple[str, ...]]] = {
        "chat": ("demo", (*loads, "--max-num-queued-reqs", str(QUEUE), "--enable-auto-tool-choice",
                          "--tool-call-parser", "hermes")),
        "embed": ("demo", ("--runner", "pooling")),
        "media": (str(llava), (*loads, "--mm-processor-cache-gb", "0.002")),
    }  # fmt: skip
    servers = []
    for name, (model, more) in flags.items():
        place = folder / f"tmp-{name}"
        place.mkdir()
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(place)}
        server = stack.enter_context(serving(*common, *more, model=model, env=env))
        servers.append(Watched(name, server, place))
    return servers


def main() -> int:
    """Start the servers, run the soak, and print the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=1 / 6, help="part of the time (1/6)")
    parser.add_argument("--flat", type=float, default=1.0, help="per cent of growth (1)")
    parser.add_argument("--clients", type=int, default=2 * (ROWS + QUEUE // 2))
    parser.add_argument("--pause", type=float, default=0.0, help="mean seconds (0)")
    parser.add_argument("--kills", type=int, default=0, help="of each of two engines (0)")
    parser.add_argument("--until", type=clock, help="end at HH:MM, UTC, instead of --minutes")
    parser.add_argument(
        "--filled", type=int, help="batches before the soak (1000; below 10 minutes none)"
    )
    parser.add_argument("--patience", type=float, default=600.0, help="seconds per request (600)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        llava = write_llava(folder / "llava")
        adapters = {"chat": folder / "qwen", "media": folder / "llama"}
        write_adapters(adapters["chat"], layers=6, prefix="model", shape=(256, 256))
        write_adapters(adapters["media"], layers=3, prefix="model.language_model", shape=(64, 64))
        with ExitStack() as running:
            servers = start(running, folder, llava)
            tally, ends = asyncio.run(soak(servers, adapters, options))
            settled = 60 * options.minutes * options.settle
            print(table(tally, ends, settled))
            wrong = verdict(tally, ends, settled, options.flat)
        wrong += left_over(servers)
    print("\n".join(["", *wrong] if wrong else ["", "nothing was lost"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
