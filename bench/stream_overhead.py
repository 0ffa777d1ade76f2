"""The server's CPU time per streamed token, with an engine that answers immediately and no network.

CPU time of the application from the engine's output to the bytes of a frame, for
/v1/chat/completions and /v1/completions; and the time from token ids to an engine request. Streams
wait for each other with their first frame, and time is measured from then on: how long requests
take to begin (a chat template is rendered in another process) is not part of it.

    python bench/stream_overhead.py [--streams 32] [--tokens 200] [--prompt 8000] [--repeat 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from modulm import SamplingParams
from modulm.config import EngineConfig
from modulm.contracts.tokenizer import Tokenizer
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tokenizer
from modulm_frontend.input_processor import InputProcessor
from modulm_server.app import create_app
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_tokenizers.tokenizer import load_tokenizer

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}


async def stream(app: Any, path: str, body: bytes, start: asyncio.Barrier) -> int:
    """Send one request to the application; returns the number of frames.

    start: where the streams meet before any of them goes on after its first frame.
    """
    given, frames, never = False, 0, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await never.wait()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal frames
        frames += message["type"] == "http.response.body"
        if frames == 1 and message["type"] == "http.response.body":
            await start.wait()

    headers = [
        (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)),
    ]  # fmt: skip
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
             "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
             "query_string": b"", "headers": headers, "client": None, "server": None}  # fmt: skip
    await app(scope, receive, send)
    return frames


async def crowd(app: Any, path: str, options: argparse.Namespace) -> float:
    """Measure the microseconds of CPU time per streamed token."""
    body = {"stream": True, "max_tokens": options.tokens, "ignore_eos": True, **BODIES[path]}
    data = json.dumps(body).encode()
    start = asyncio.Barrier(options.streams + 1)
    streams = [asyncio.create_task(stream(app, path, data, start)) for _ in range(options.streams)]
    await start.wait()
    began = time.process_time()
    frames = await asyncio.gather(*streams)
    seconds = time.process_time() - began
    if min(frames) < options.tokens // 2:
        raise SystemExit(f"{path}: {min(frames)} frames")
    return seconds / (options.streams * options.tokens) * 1e6


def prompt(tokenizer: Tokenizer, length: int, repeat: int = 50) -> float:
    """Measure the microseconds from a list of token ids to an engine request."""
    info = scripted_info(tokenizer, max_model_len=2 * length)
    processor = InputProcessor(info, tokenizer, manager.current())
    ids = [i % 400 for i in range(length)]
    params = SamplingParams(max_tokens=4)
    began = time.process_time()
    for number in range(repeat):
        processor.process({"prompt_token_ids": ids}, params, str(number))
    return (time.process_time() - began) / repeat * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(make_tokenizer(Path(folder), vocab=512))
    info = scripted_info(tokenizer, max_model_len=4096)
    engine = ScriptedEngine(tokenizer, lambda text, params: Reply("1 2 3 4 ", endless=True), info)
    served = create_app(engine, EngineConfig.from_keywords(model="M"))
    for path in BODIES:
        found = [asyncio.run(crowd(served.app, path, options)) for _ in range(options.repeat)]
        print(f"{path:>24}  {min(found):8.1f} us a token", flush=True)
    found = [prompt(tokenizer, options.prompt) for _ in range(options.repeat)]
    print(f"{options.prompt:>12} prompt ids  {min(found):8.1f} us", flush=True)


if __name__ == "__main__":
    main()
