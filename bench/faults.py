"""Injects faults and checks what is lost: python bench/faults.py kill --minutes 10

slow   thousands of connections that send a byte a second, in heads and in bodies
disk   a full disk under files, batches and logs
clock  the machine's clock set back and forward (by a shim under libc)
kill   `kill -9` of each process in turn: server, engine, rank, and those that compile constraints,
       render templates and decode media
stop   SIGTERM during a start, a load, requests, and a batch

Each kind repeats until the time is up (0: one round), prints what it observed, and exits with 0 if
the server answered correctly and nothing acknowledged was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import harness
from harness import Client, Lost, Server, alive, command_of, form, serving, shared_files
from soak_kinds import picture
from soak_models import write_llava

from modulm_chat.sandbox import RenderLimits, checkpoint_renderer

CHAT = "/v1/chat/completions"
#: Flags of a server with little other work.
SMALL = ("--cpu-threads", "1", "--max-num-seqs", "8", "--num-gpu-blocks-override", "128")
#: Part of the command of the process that decodes media.
DECODER = "modulm_media.decode_worker"
BATCH = {"endpoint": CHAT, "completion_window": "24h"}


def said(**fields: Any) -> dict[str, Any]:
    return {"model": "M", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8,
            "temperature": 0, **fields}  # fmt: skip


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for a condition. Raises Bad after `seconds`."""
    latest = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > latest:
            raise Bad(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.02)


class Bad(Exception):
    """A check failed."""


def need(condition: bool, what: str) -> None:
    if not condition:
        raise Bad(what)


def ask(server: Server, method: str, path: str, *body: Any) -> harness.Reply:
    """Send one request, outside of any event loop."""
    return asyncio.run(Client(server.port).ask(method, path, *body))


def answer(server: Server) -> str:
    """The model's answer to a question with a deterministic answer."""
    reply = ask(server, "POST", CHAT, said())
    need(reply.status == 200, f"a plain request: {reply.status} {reply.body[:200]!r}")
    return str(reply.json()["choices"][0]["message"]["content"])


def gone(pids: list[int], what: str, seconds: float = 30.0) -> None:
    """Wait until none of the processes is left."""
    try:
        until(lambda: not any(map(alive, pids)), what, seconds)
    except Bad:
        left = [command_of(pid) for pid in pids if alive(pid)]
        raise Bad(f"{what}: left behind: {left}") from None


@contextmanager
def folder_for_temporary() -> Iterator[tuple[Path, dict[str, str]]]:
    """A temporary folder as a server's TMPDIR, and the environment that names it."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        yield Path(folder), {**os.environ, "TMPDIR": folder}


# kill -9


def kill(options: argparse.Namespace) -> str:
    """Kill each process in turn: the failure is reported, and no process or file is left behind."""
    pauses = (None, 0.0, 0.01, 0.05) if options.minutes else (None, 0.01)
    told = []
    for word, code in (("engine.engine_process", 1), ("serve", -signal.SIGKILL)):
        with folder_for_temporary() as (folder, env):
            told.append(kill_one(word, code, folder, env))
    with folder_for_temporary() as (_folder, env):
        told.append(kill_worker(env))
    with folder_for_temporary() as (_folder, env):
        told.append(kill_helpers(env, pauses))
    for killed in (kill_rank, kill_decoder):
        with folder_for_temporary() as (folder, env):
            told.append(killed(folder, env))
    return "; ".join(told)


def kill_one(word: str, code: int, folder: Path, env: dict[str, str]) -> str:
    """Kill a process that the service cannot run without."""
    with serving(*SMALL, "--api-server-count", "2", env=env) as server:
        named = ("serve", "api_worker", "engine_process")

        def parts() -> list[str]:
            lines = map(command_of, server.family())
            return [line for line in lines if any(name in line for name in named)]

        until(lambda: len(parts()) == 3, "three processes")
        pids = server.family()
        answer(server)
        seen = asyncio.run(killed_in_stream(server, word))
        found = server.process.wait(60)
        need(found == code, f"after the death of {word} the server ended with {found}, not {code}")
        gone(pids, f"after the death of {word}")
        left = [str(path) for path in folder.iterdir()]
        need(not left, f"after the death of {word} these stay: {left}")
    return f"{word}: {seen}"


async def killed_in_stream(server: Server, word: str) -> str:
    """Kill a process during a stream; returns how the stream ended."""
    client = Client(server.port)
    last = b""
    try:
        body = said(stream=True, max_tokens=400, ignore_eos=True)
        async for data in client.stream(CHAT, body):
            if not last:
                os.kill(server.part(word), signal.SIGKILL)
            last = data if data != b"[DONE]" else last
    except Lost:
        return "the connection broke"
    need(b"error" in last or word == "serve", f"the stream ended as if it were whole: {last!r}")
    return f"the stream ended with {json.loads(last).get('error', {}).get('code')}"


def kill_worker(env: dict[str, str]) -> str:
    """Kill an additional server process: it is restarted, and requests on others continue."""
    with serving(*SMALL, "--api-server-count", "2", env=env) as server:
        before = answer(server)
        worker = server.part("api_worker")
        os.kill(worker, signal.SIGKILL)
        until(lambda: not alive(worker), "the worker ends")

        def replaced() -> bool:
            with suppress(LookupError):
                return server.part("api_worker") != worker
            return False

        until(replaced, "another worker")
        need(all(answer(server) == before for _ in range(8)), "other answers after a death")
    return "api_worker: replaced"


def kill_helpers(env: dict[str, str], pauses: Sequence[float | None]) -> str:
    """Kill the helpers that compile grammars and render templates, idle (a pause of None) or that
    many seconds into a request: they are restarted.
    """
    with serving(*SMALL, "--trust-request-chat-template", env=env) as server:
        before, numbers = answer(server), iter(range(1, 100))

        def compiled() -> None:
            expression = f"[a-c]{{{next(numbers)}}}"
            body = {"model": "M", "prompt": "x", "max_tokens": 99, "temperature": 0,
                    "structured_outputs": {"regex": expression}}  # fmt: skip
            reply = ask(server, "POST", "/v1/completions", body)
            need(reply.status == 200, f"a grammar: {reply.status} {reply.body[:200]!r}")
            text = reply.json()["choices"][0]["text"]
            need(re.fullmatch(expression, text) is not None, f"{text!r} is not {expression}")

        def rendered() -> None:
            counting = "{% for i in range(2000) %}{% endfor %}{{ messages[0].content }}"
            template = counting + " " * next(numbers)
            reply = ask(server, "POST", CHAT, said(chat_template=template))
            need(reply.status == 200, f"a template: {reply.status} {reply.body[:200]!r}")

        def rendered_own() -> None:
            reply = ask(server, "POST", CHAT, said())
            need(reply.status == 200, f"the model's template: {reply.status} {reply.body[:200]!r}")

        helpers = (
            ("compile_process", compiled),
            (f"sandbox_worker {RenderLimits().memory}", rendered),
            (f"sandbox_worker {checkpoint_renderer().limits.memory}", rendered_own),
        )
        for word, work in helpers:
            work()
            for pause in pauses:
                kill_helper(server, word, work, pause)
        need(answer(server) == before, "another answer after the death of helpers")
    return f"{' and '.join(word for word, _ in helpers)}: replaced, every request answered"


def kill_helper(server: Server, word: str, work: Callable[[], None], pause: float | None) -> None:
    """Kill a helper while idle, or `pause` seconds into a request; the work is completed anyway."""
    helper = server.part(word)
    with ThreadPoolExecutor(1) as pool:
        asked = None
        if pause is not None:
            asked = pool.submit(work)
            time.sleep(pause)
        os.kill(helper, signal.SIGKILL)
        if asked is not None:
            asked.result()
    work()
    need(server.part(word) != helper, f"{word} was not replaced")


def kill_rank(folder: Path, env: dict[str, str]) -> str:
    """Kill one of two ranks during a stream: the server ends with the reason and leaves nothing."""
    with serving(*SMALL, "--tensor-parallel-size", "2", env=env) as server:
        answer(server)
        pids, shared = server.family(), shared_files(server.family())
        ranks = [pid for pid in pids if "worker_process" in command_of(pid)]
        need(len(ranks) == 2, f"two ranks, not {len(ranks)}")
        seen = asyncio.run(killed_in_stream(server, command_of(ranks[-1])))
        found = server.process.wait(60)
        need(found == 1, f"after the death of a rank the server ended with {found}, not 1")
        gone(pids, "after the death of a rank")
        left = [str(path) for path in folder.iterdir()]
        left += [file for file in shared if Path(file).exists()]
        need(not left, f"after the death of a rank these stay: {left}")
    return f"rank: {seen}"


def kill_decoder(folder: Path, env: dict[str, str]) -> str:
    """Kill the process that decodes media, idle and during requests: another takes its place, and
    what it held ends with a clear error at worst.
    """
    model, place = write_llava(folder / "llava"), folder / "tmp"
    place.mkdir()
    with serving(*SMALL, model=str(model), env={**env, "TMPDIR": str(place)}) as server:
        rng, seen = random.Random(0), Counter[int]()

        def asked() -> harness.Reply:
            content = [{"type": "image_url", "image_url": {"url": picture(rng)}}]
            body = {"model": "M", "messages": [{"role": "user", "content": content}],
                    "max_tokens": 4}  # fmt: skip
            return ask(server, "POST", CHAT, body)

        need(asked().status == 200, "an image before any death")
        for pause in (None, 0.0, 0.02):
            decoder = server.part(DECODER)
            with ThreadPoolExecutor(4) as pool:
                replies = [pool.submit(asked) for _ in range(0 if pause is None else 4)]
                time.sleep(pause or 0.0)
                os.kill(decoder, signal.SIGKILL)
                seen.update(reply.result().status for reply in replies)
            need(asked().status == 200, "an image after a death")
        need(set(seen) <= {200, 400}, f"images beside a death: {dict(seen)}")
        pids = server.family()
        server.process.send_signal(signal.SIGTERM)
        need(server.process.wait(60) in (0, 143), "the end of the server")
        gone(pids, "after the death of decoders")
        # A user's processes share PyTorch's cache of compiled code.
        left = [str(path) for path in place.iterdir() if "torchinductor" not in path.name]
        need(not left, f"after the death of decoders these stay: {left}")
    return f"decoder: replaced, images beside its death {dict(seen)}"


# SIGTERM


def stop(_: argparse.Namespace) -> str:
    """SIGTERM in each phase of a server's life: all processes end, and nothing is left behind."""
    told = [stop_early(pause) for pause in (0.3, 1.0, 2.0)]
    told.append(stop_in_batch())
    return "; ".join(told)


def stop_early(pause: float) -> str:
    """SIGTERM `pause` seconds after the start, ready or not."""
    with folder_for_temporary() as (folder, env), serving(*SMALL, wait=False, env=env) as server:
        time.sleep(pause)
        pids, ready = server.family(), server.get("/health", 0.5)[0] == 200
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(60)
        # The signal's default action applies before the process installs its handler.
        expected = (0,) if ready else (0, 128 + signal.SIGTERM, -signal.SIGTERM)
        need(code in expected, f"SIGTERM after {pause} s: code {code}, not one of {expected}")
        gone(pids, f"SIGTERM after {pause} s")
        left = [path.name for path in folder.iterdir()]
        need(not left or code == -signal.SIGTERM, f"SIGTERM after {pause} s leaves {left}")
    return f"after {pause} s, {'ready' if ready else 'not ready'}: code {code}"


def lines(count: int, **fields: Any) -> bytes:
    """The input of a batch."""
    return b"\n".join(
        json.dumps({"custom_id": str(i), "method": "POST", "url": CHAT, "body": said(**fields)})
        .encode()
        for i in range(count)
    )  # fmt: skip


def upload(server: Server, content: bytes) -> str:
    reply = ask(server, "POST", "/v1/files", *form("lines.jsonl", content))
    need(reply.status == 200, f"an upload: {reply.status} {reply.body[:200]!r}")
    return str(reply.json()["id"])


def batch_of(server: Server, identity: str) -> dict[str, Any]:
    reply = ask(server, "GET", f"/v1/batches/{identity}")
    need(reply.status == 200, f"the batch: {reply.status} {reply.body[:200]!r}")
    found: dict[str, Any] = reply.json()
    return found


def records(server: Server, *identities: str | None) -> list[str]:
    """The custom ids in the output files of a batch."""
    found = []
    for identity in filter(None, identities):
        reply = ask(server, "GET", f"/v1/files/{identity}/content")
        need(reply.status == 200, f"a file of the batch: {reply.status}")
        found += [json.loads(line)["custom_id"] for line in reply.body.splitlines()]
    return found


def errors_of(server: Server, batch: dict[str, Any]) -> str:
    return str(ask(server, "GET", f"/v1/files/{batch['error_file_id']}/content").body[:600])


def stop_in_batch() -> str:
    """SIGTERM during a batch: a server on the same files resumes it."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        flags = (*SMALL, "--file-storage-path", folder, "--shutdown-timeout", "1")
        with serving(*flags) as server:
            source = upload(server, lines(60, max_tokens=40, ignore_eos=True))
            asked = {"input_file_id": source, **BATCH}
            batch = ask(server, "POST", "/v1/batches", asked).json()
            until(lambda: batch_of(server, batch["id"])["request_counts"]["completed"] > 0, "begun")
            done = batch_of(server, batch["id"])["request_counts"]["completed"]
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(60)
            need(code == 0, f"SIGTERM in a batch: code {code}")
        with serving(*flags) as server:
            over = ("completed", "failed", "cancelled")
            until(lambda: batch_of(server, batch["id"])["status"] in over, "the batch ends", 180)
            found = batch_of(server, batch["id"])
            need(found["status"] == "completed", f"the batch after a restart: {found}")
            need(found["request_counts"]["failed"] == 0, f"failed: {errors_of(server, found)}")
            names = records(server, found["output_file_id"])
            need(sorted(names, key=int) == [str(i) for i in range(60)], f"its records: {names}")
    return f"a batch stopped after {done} of 60 lines was finished by the next server"


# A full disk


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """Mount a file system of this size. Raises Skip if that is not permitted."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if mounted.returncode:
            raise Skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


class Skip(Exception):
    """The fault cannot be produced on this machine."""


def disk(_: argparse.Namespace) -> str:
    """Uploads, batches and logs on a full disk of 4 MB."""
    with (
        small_disk(4) as folder,
        (folder / "log").open("wb") as log,
        serving(*SMALL, "--enable-log-requests", "--file-storage-path", str(folder / "files"),
                stderr=log, stdout=log, env={**os.environ, "TMPDIR": str(folder)}) as server,
    ):  # fmt: skip
        before = answer(server)
        kept = {upload(server, content): content for content in (b"a" * 1000, b"b" * 2000)}
        source = upload(server, lines(40, max_tokens=30, ignore_eos=True))
        statuses = fill(server, kept)
        batch = full_batch(server, source, folder)
        need(answer(server) == before, "another answer on a full disk")
        for identity, content in kept.items():
            reply = ask(server, "GET", f"/v1/files/{identity}/content")
            need(reply.body == content, f"a file that was acknowledged: {reply.status}")
        listed = {card["id"] for card in ask(server, "GET", "/v1/files").json()["data"]}
        need({*kept, source} <= listed, "files that were acknowledged are not listed")
        for identity in list(kept)[2:]:
            need(ask(server, "DELETE", f"/v1/files/{identity}").status == 200, "not deleted")
        (folder / "filler").unlink(missing_ok=True)
        upload(server, b"c" * 500_000)
        need(answer(server) == before, "another answer after a full disk")
    return f"uploads: {sorted(set(statuses))}, a batch: {batch}, {len(kept)} files kept"


def fill(server: Server, kept: dict[str, bytes]) -> list[int]:
    """Upload files of several sizes until the disk is full; `kept` gets the accepted ones."""
    statuses = []
    for size in (1_500_000, 1_500_000, 1_500_000, 300_000, 300_000, 50_000, 50_000):
        content = os.urandom(size)
        reply = ask(server, "POST", "/v1/files", *form("noise", content, "user_data"))
        statuses.append(reply.status)
        need(reply.status in (200, 507), f"an upload: {reply.status} {reply.body[:300]!r}")
        if reply.status == 200:
            kept[reply.json()["id"]] = content
    need(507 in statuses, f"no upload was refused: {statuses}")
    return statuses


def full_batch(server: Server, source: str, folder: Path) -> str:
    """Run a batch on a full disk; returns how it ends."""
    with suppress(OSError), (folder / "filler").open("wb") as filler:
        while True:
            filler.write(b"\0" * 4096)
            filler.flush()
    reply = ask(server, "POST", "/v1/batches", {"input_file_id": source, **BATCH})
    if reply.status != 200:
        need(reply.status == 507, f"a batch: {reply.status} {reply.body[:300]!r}")
        return "507"
    over = ("completed", "failed", "cancelled")
    until(lambda: batch_of(server, reply.json()["id"])["status"] in over, "the batch ends")
    found = batch_of(server, reply.json()["id"])
    need(found["status"] == "failed", f"a batch on a full disk: {found}")
    return str(found["errors"]["data"][0]["code"])


# The clock

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long shift(void) {
    long seconds = 0;
    const char *path = getenv("FAULTS_CLOCK");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t which, struct timespec *value) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(which, value);
    if (!code && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        value->tv_sec += shift();
    return code;
}
time_t time(time_t *value) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (value) *value = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict value, void *restrict zone) {
    struct timespec now;
    (void) zone;
    clock_gettime(CLOCK_REALTIME, &now);
    value->tv_sec = now.tv_sec;
    value->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def clock(_: argparse.Namespace) -> str:
    """Set the clock a day back, ten years forward and back again, during streams and batches."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        shim, shift = Path(folder, "shim.so"), Path(folder, "shift")
        Path(folder, "shim.c").write_text(SHIM)
        try:
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-O1", "-o", str(shim), f"{folder}/shim.c", "-ldl"],
                check=True, capture_output=True,
            )  # fmt: skip
        except (OSError, subprocess.CalledProcessError) as error:
            raise Skip(f"no C compiler: {error}") from error
        env = {**os.environ, "LD_PRELOAD": str(shim), "FAULTS_CLOCK": str(shift)}
        flags = (*SMALL, "--shutdown-timeout", "5", "--request-timeout", "5")
        with serving(*flags, env=env) as server:
            return clock_moves(server, shift)


def clock_moves(server: Server, shift: Path) -> str:
    before = answer(server)
    source = upload(server, lines(30))
    day, decade = 86_400, 10 * 365 * 86_400
    seen = []
    for moved in (-day, decade, -decade, 0):
        batch = ask(server, "POST", "/v1/batches", {"input_file_id": source, **BATCH}).json()
        seconds = asyncio.run(moved_in_stream(server, shift, moved))
        need(0 <= seconds < 30, f"a stream took {seconds:.0f} s of a clock that never jumps")
        card = ask(server, "POST", "/v1/files", *form("x", b"x")).json()
        expected = time.time() + moved
        need(abs(card["created_at"] - expected) < 30, "the shim is not under the server")
        over = ("completed", "failed")
        until(lambda: batch_of(server, batch["id"])["status"] in over, "the batch ends")  # noqa: B023
        found = batch_of(server, batch["id"])
        need(found["request_counts"]["completed"] == 30, f"the batch: {found}")
        need(answer(server) == before, "another answer under another clock")
        need(server.get(f"/v1/files/{source}")[0] == 200, "a file is gone with the clock")
        seen.append(found["completed_at"] - found["created_at"])
    for name in ("time_to_first_token", "e2e_request_latency"):
        total = server.metric(f"modulm:{name}_seconds_sum")
        need(0 <= total < 120, f"{name}: {total} s in all")
    return "streams, batches and files whole; durations of the monotonic clock"


async def moved_in_stream(server: Server, shift: Path, moved: int) -> float:
    """Seconds of a stream during which the clock jumps."""
    began, last = time.monotonic(), b""
    body = said(stream=True, max_tokens=120, ignore_eos=True)
    async for data in Client(server.port).stream(CHAT, body):
        if not last:
            shift.write_text(str(moved))
        last = data
        need(b'"error"' not in data, f"a stream under a clock that moved: {data!r}")
    need(last == b"[DONE]", f"a stream ended with {last!r}")
    return time.monotonic() - began


# Slow connections


def slow(options: argparse.Namespace) -> str:
    """Open connections that send a byte a second, while other clients are served."""
    harness.many_files()
    patience = 4.0 if options.minutes == 0 else 30.0
    flags = ("--request-timeout", str(patience), "--cpu-threads", "1")
    with serving(*flags, *options.flags) as server:
        before = answer(server)
        files = harness.Held.by([server.process.pid]).files
        told = asyncio.run(loris(server, options.connections, patience))
        until(
            lambda: harness.Held.by([server.process.pid]).files <= files, "connections are closed"
        )
        need(answer(server) == before, "another answer after slow connections")
    return told


HEADS = (
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x-slow: 1\r\n" * 99,
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n"
    b"content-type: application/json\r\n\r\n" + b" " * 1000,
    b"POST /v1/nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n" + b" " * 1000,
)
#: Bytes of each that are sent at once: the second is slow in its body, the third is answered early.
AT_ONCE = (0, len(HEADS[1]) - 1000, len(HEADS[2]) - 1000)


async def loris(server: Server, count: int, patience: float) -> str:
    """Open the connections, send slowly, and time normal requests meanwhile."""
    opened = open_ = 0
    lasted: list[float] = []

    async def drip(number: int) -> None:
        nonlocal opened, open_
        kind = number % len(HEADS)
        await asyncio.sleep((number % 100) / 100)
        began = time.monotonic()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        except OSError:
            return
        opened, open_ = opened + 1, open_ + 1
        try:
            writer.write(HEADS[kind][: AT_ONCE[kind]])
            for letter in HEADS[kind][AT_ONCE[kind] :]:
                writer.write(bytes([letter]))
                with suppress(TimeoutError):
                    await asyncio.wait_for(reader.read(), 1.0)
                    break
        except OSError:
            pass
        finally:
            open_ -= 1
            lasted.append(time.monotonic() - began)
            writer.transport.abort()

    dripping = [asyncio.create_task(drip(number)) for number in range(count)]
    others: list[float] = []
    most = 0
    client = Client(server.port)
    latest = time.monotonic() + 6 * patience + 60
    while not all(task.done() for task in dripping):
        began = time.monotonic()
        need(began < latest, f"{open_} slow connections are still open")
        reply = await asyncio.wait_for(client.ask("POST", CHAT, said()), 60)
        need(reply.status == 200, f"beside slow connections: {reply.status}")
        others.append(time.monotonic() - began)
        most = max(most, open_)
        await asyncio.sleep(0.1)
    need(opened == count, f"only {opened} of {count} connections were taken")
    others.sort()
    return (
        f"{opened} slow connections, {most} at once, each cut off after at most "
        f"{max(lasted):.1f} s; {len(others)} others answered, "
        f"median {others[len(others) // 2]:.2f} s, at most "
        f"{others[-1]:.2f} s"
    )


KINDS = {"slow": slow, "disk": disk, "clock": clock, "kill": kill, "stop": stop}


def main() -> int:
    """Run rounds of one kind of fault, or of all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=[*KINDS, "all"])
    parser.add_argument("--minutes", type=float, default=0.0, help="rounds for so long; 0: one")
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--flags", type=str.split, default=[], help="for the server of `slow`")
    options = parser.parse_args()
    end, code = time.monotonic() + 60 * options.minutes, 0
    while True:
        for name in KINDS if options.kind == "all" else (options.kind,):
            began = time.monotonic()
            try:
                told = KINDS[name](options)
            except Skip as reason:
                told = f"skipped: {reason}"
            except (Bad, Lost) as error:
                told, code = f"NOT AS IT SHOULD BE: {error}", 1
            print(f"{name:6} {time.monotonic() - began:6.1f} s  {told}", flush=True)
        if time.monotonic() >= end or code:
            return code


if __name__ == "__main__":
    sys.exit(main())
