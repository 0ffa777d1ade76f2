"""vLLM's own proxies, unchanged, before two of our servers: answers, and what was not computed.

    pip download vllm==0.33.0 --no-deps --no-binary :all: && tar xf vllm-0.33.0.tar.gz
    python bench/vllm_proxies.py vllm-0.33.0/examples/disaggregated/disaggregated_serving

disagg_proxy_multiturn.py passes `kv_transfer_params` on between servers with NixlConnector;
disagg_proxy_demo.py asks both servers for the same prompt, which here share a folder
(ExampleConnector). They need fastapi, httpx, aiohttp, requests and uvloop.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from harness import STARTING, Server, free_port, serving

PROMPT = "The sky is blue because " * 12
FLAGS = ("--block-size", "32", "--enable-prompt-tokens-details")
LOADED = "modulm:external_prefix_cache_hits_total"


@contextmanager
def proxy(script: Path, *flags: str) -> Iterator[str]:
    """Run a proxy; yields its address."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(script), "--port", str(port), *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        latest = time.monotonic() + STARTING
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/openapi.json", timeout=5)
                break
            except httpx.HTTPError:
                if process.poll() is not None or time.monotonic() > latest:
                    raise SystemExit(f"{script.name} did not start") from None
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def pair(tables: Sequence[dict[str, Any]]) -> Iterator[list[Server]]:
    """Two servers with connectors."""
    with ExitStack() as stack:
        flags = [("--kv-transfer-config", json.dumps(table)) for table in tables]
        servers = [stack.enter_context(serving(*FLAGS, *more, wait=False)) for more in flags]
        for server in servers:
            server.wait()
        yield servers


def text_of(url: str, route: str, body: dict[str, Any]) -> str:
    """The text of an answer, also of a streamed one."""
    answer = httpx.post(f"{url}/v1/{route}", json={"model": "M", **body}, timeout=STARTING)
    answer.raise_for_status()
    if body.get("stream"):
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        choices = [json.loads(event)["choices"] for event in events if event != "[DONE]"]
        return "".join(
            each[0].get("text") or each[0].get("delta", {}).get("content") or ""
            for each in choices
            if each
        )
    (choice,) = answer.json()["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def compare(name: str, url: str, servers: Sequence[Server], more: dict[str, Any]) -> int:
    """Ask the proxy and a server alone; print what came. Returns how many answers differ."""
    greedy = {"max_tokens": 12, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": PROMPT + "and then?"}]}
    different = 0
    for route, body in (("completions", {"prompt": PROMPT}), ("chat/completions", chat)):
        for stream in (False, True):
            # Another beginning each time: nothing is in a prefix cache.
            begun = json.loads(json.dumps(body).replace("The sky", f"{route} {stream}: the sky", 1))
            before = servers[1].metric(LOADED)
            request = {**begun, **greedy, "stream": stream}
            found = text_of(url, route, {**request, **more})
            loaded = servers[1].metric(LOADED) - before
            wanted = text_of(servers[0].url, route, request)
            same = found == wanted
            different += not (same and loaded)
            how = "streamed" if stream else "whole"
            said = "the same text" if same else f"{found!r} instead of {wanted!r}"
            print(f"{name}: {route}, {how}: {said}, {loaded:.0f} tokens fetched", flush=True)
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    options = {"cpu_bytes_to_use": 1 << 24}
    nixl = [
        {
            "kv_connector": "NixlConnector", "kv_role": role, "kv_port": free_port(),
            "kv_connector_extra_config": options,
        }
        for role in ("kv_producer", "kv_consumer")
    ]  # fmt: skip
    script = folder / "disagg_proxy_multiturn.py"
    with pair(nixl) as servers:
        ports = [str(server.port) for server in servers]
        flags = ("--prefiller-port", ports[0], "--decoder-port", ports[1])
        with proxy(script, *flags) as url:
            different = compare(script.name, url, servers, {"conversation_id": "one"})
    script = folder / "disagg_proxy_demo.py"
    with tempfile.TemporaryDirectory() as shared:
        place = {"shared_storage_path": shared}
        table = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": place}
        with pair([table, table]) as servers:
            places = [f"localhost:{server.port}" for server in servers]
            flags = ("--model", "M", "--prefill", places[0], "--decode", places[1])
            with proxy(script, *flags) as url:
                different += compare(script.name, url, servers, {})
    print("all as expected" if not different else f"{different} answers were not as expected")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
