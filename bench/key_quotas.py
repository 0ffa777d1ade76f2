"""Time to first token of one key while another is at its quotas: python bench/key_quotas.py

A server with `--scheduling-policy fair` has two keys. `other` sends one streamed request at a time.
`flood` does one kind of work without end, as far as its quotas let it:

uploads   stores files until the limit refuses them
batches   runs batches of 200 lines, 32 lines at once
streams   as many streams as its key may have, and more that are refused
refused   requests beyond its rate, all of which get 429

Turns alone and beside the flood alternate in one run, so that what else the machine does counts in
both. The clients of the flood are a process of their own with the lowest priority, as if they were
on another machine: their work is not the server's. Prints medians and their ratio; the aim is 1.2
at most. Exits with 1 above --most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import httpx
from harness import serving

CHAT = "/v1/chat/completions"
KEYS = """
keys:
  - {name: other, key: other}
  - {name: flood, key: flood, streams: 4, connections: 8}
  - {name: poor, key: poor, requests_per_minute: 60}
  - {name: store, key: store}
"""
#: Requests of a flood in progress at once.
CLIENTS = 16

Flood = Callable[[httpx.AsyncClient, Counter[int]], Awaitable[None]]


def body(tokens: int, words: int = 0, **fields: object) -> dict[str, object]:
    text = "Count to a hundred." + " One more word." * (words // 3)
    messages = [{"role": "user", "content": text}]
    return {"model": "M", "messages": messages, "max_tokens": tokens, "ignore_eos": True, **fields}


async def first_token(
    http: httpx.AsyncClient, tokens: int = 4, words: int = 0
) -> tuple[int, float]:
    """(status, seconds to the first token) of a stream, which is read to its end."""
    began, first = time.perf_counter(), 0.0
    async with http.stream("POST", CHAT, json=body(tokens, words, stream=True)) as answer:
        async for line in answer.aiter_lines():
            if '"content":"' in line and not first:
                first = time.perf_counter() - began
    return answer.status_code, first or time.perf_counter() - began


async def uploads(http: httpx.AsyncClient, seen: Counter[int]) -> None:
    parts = {"data": {"purpose": "user_data"}, "files": {"file": ("x", b"x" * 65_536)}}
    seen[(await http.post("/v1/files", **parts)).status_code] += 1


async def batches(http: httpx.AsyncClient, seen: Counter[int]) -> None:
    lines = [{"custom_id": str(i), "url": CHAT, "body": body(8)} for i in range(200)]
    content = "\n".join(map(json.dumps, lines)).encode()
    parts = {"data": {"purpose": "batch"}, "files": {"file": ("x", content)}}
    file = (await http.post("/v1/files", **parts)).json()
    batch = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    answer = await http.post("/v1/batches", json=batch)
    seen[answer.status_code] += 1
    identity = answer.json()["id"]
    try:
        while (await http.get(f"/v1/batches/{identity}")).json()["status"] != "completed":
            await asyncio.sleep(0.2)
    finally:
        await asyncio.shield(http.post(f"/v1/batches/{identity}/cancel"))


async def streams(http: httpx.AsyncClient, seen: Counter[int]) -> None:
    status, _ = await first_token(http, 200)
    seen[status] += 1
    if status == 429:
        await asyncio.sleep(0.1)


async def refused(http: httpx.AsyncClient, seen: Counter[int]) -> None:
    seen[(await http.post(CHAT, json=body(1))).status_code] += 1
    await asyncio.sleep(0.05)


#: What floods, with which key, and how many at once.
FLOODS: dict[str, tuple[Flood, str, int]] = {
    "uploads": (uploads, "store", 2),
    "batches": (batches, "flood", 4),
    "streams": (streams, "flood", CLIENTS),
    "refused": (refused, "poor", CLIENTS),
}


async def forever(work: Flood, http: httpx.AsyncClient, seen: Counter[int]) -> None:
    while True:
        with suppress(httpx.HTTPError, KeyError):
            await work(http, seen)


def client(url: str, key: str) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=600)


async def flood(url: str, kind: str) -> None:
    """Flood while there is a line of standard input, until the next; ends with a count of statuses
    for each.
    """
    os.nice(19)
    work, key, clients = FLOODS[kind]
    async with client(url, key) as http:
        while await asyncio.to_thread(sys.stdin.readline):
            seen: Counter[int] = Counter()
            tasks = [asyncio.create_task(forever(work, http, seen)) for _ in range(clients)]
            await asyncio.to_thread(sys.stdin.readline)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            print(json.dumps(seen), flush=True)


async def compare(url: str, kind: str, options: argparse.Namespace) -> float:
    """Measure in turns, print a line, and return the ratio."""
    times: dict[bool, list[float]] = {False: [], True: []}
    seen: Counter[str] = Counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--flood", url, kind,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("no pipes")
    async with client(url, "other") as other:
        await first_token(other, words=options.words)
        for turn in range(2 * options.turns):
            beside = bool(turn % 2)
            if beside:
                process.stdin.write(b"\n")
            await asyncio.sleep(options.settle)
            for _ in range(options.samples):
                times[beside].append((await first_token(other, words=options.words))[1])
            if beside:
                process.stdin.write(b"\n")
                seen.update(json.loads(await process.stdout.readline()))
    process.stdin.close()
    await process.wait()
    alone, flooded = (1e3 * statistics.median(times[beside]) for beside in (False, True))
    answers = ", ".join(f"{count} x {status}" for status, count in sorted(seen.items()))
    print(f"{kind:8} alone {alone:7.1f} ms, beside {flooded:7.1f} ms: {flooded / alone:.2f}"
          f"  (flood: {answers})", flush=True)  # fmt: skip
    return flooded / alone


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=list(FLOODS), help=", ".join(FLOODS))
    parser.add_argument("--turns", type=int, default=5, help="of each kind")
    parser.add_argument("--samples", type=int, default=8, help="in a turn")
    parser.add_argument("--words", type=int, default=0, help="more words in prompts of `other`")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds before the samples")
    parser.add_argument("--most", type=float, default=1.2, help="largest ratio")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--flood", metavar="URL", help="flood a server (used by this script)")
    options = parser.parse_args()
    if options.flood is not None:
        asyncio.run(flood(options.flood, options.kinds[0]))
        return 0
    with tempfile.TemporaryDirectory(prefix="quotas-") as folder:
        keys = Path(folder, "keys.yaml")
        keys.write_text(KEYS)
        keys.chmod(0o600)
        flags = ("--scheduling-policy", "fair", "--api-keys-file", str(keys),
                 "--max-stored-files", "800", "--no-enable-prefix-caching")  # fmt: skip
        with serving(*flags, model=options.model) as server:
            ratios = [asyncio.run(compare(server.url, kind, options)) for kind in options.kinds]
    return int(max(ratios) > options.most)


if __name__ == "__main__":
    sys.exit(main())
