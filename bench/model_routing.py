"""What routing by model adds to a request on a server of several models.

CPU time of the dispatcher, from the request at its route to the model's endpoint and back, over
calling the endpoint alone, both of which decode the body once: bodies of three sizes, the model
being loaded. No network, no engine.

    python bench/model_routing.py [--requests 2000] [--repeat 7]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from typing import Any

from modulm.config import EngineConfig
from modulm.testing.checkpoints import make_tokenizer
from modulm_server.app import ModelRoutes
from modulm_server.json_body import read_object
from modulm_server.models.dispatch import Dispatched
from modulm_server.models.pool import ModelPool
from modulm_server.models.settings import ModelSettings
from modulm_server.route import RouteFamily
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_tokenizers.tokenizer import load_tokenizer

PATH = "/v1/chat/completions"
SIZES = (200, 10_000, 200_000)


class Family(RouteFamily):
    """A family of an API whose errors have OpenAI's form."""

    name = "bench"
    api = 2

    def router(self) -> Any:
        raise NotImplementedError


async def endpoint(scope: Any, receive: Any, send: Any) -> None:
    """Read and decode the body as every endpoint does, without its schema."""
    body = (await receive())["body"]
    if "modulm.json" not in scope:
        await read_object(body)


def ready_pool(models: int) -> ModelPool:
    """A pool of loaded models, without engines that compute."""
    config = EngineConfig.from_keywords(model="m0")
    settings = [
        ModelSettings(name=f"m{index}", config=config, aliases=(f"alias{index}",))
        for index in range(models)
    ]
    pool = ModelPool(config, lambda: settings)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(make_tokenizer(folder, vocab=512))
    info = scripted_info(tokenizer, config=config)
    for model in pool.models:
        model.engine = ScriptedEngine(tokenizer, lambda *_: Reply(""), info)
        model.routes = ModelRoutes(None, (), {("POST", PATH): endpoint}, None)  # type: ignore[arg-type]
        model.state = "loaded"
    return pool


async def measure(app: Any, body: bytes, requests: int) -> float:
    """Microseconds of CPU time per request."""
    headers = [(b"content-type", b"application/json")]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        raise SystemExit(f"unexpected answer: {message}")

    began = time.process_time()
    for _ in range(requests):
        scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"",
                 "headers": headers, "modulm.owner": ""}  # fmt: skip
        await app(scope, receive, send)
    return (time.process_time() - began) / requests * 1e6


async def main(options: argparse.Namespace) -> None:
    """Print the best of the repetitions."""
    pool = ready_pool(20)
    dispatched = Dispatched(pool, Family(None), PATH, endpoint)  # type: ignore[arg-type]
    print("body (bytes) | endpoint (us) | with routing (us) | added (us)")
    for size in SIZES:
        message = {"role": "user", "content": "x" * size}
        body = json.dumps({"model": "alias19", "stream": True, "messages": [message]}).encode()
        alone, routed = [], []
        for _ in range(options.repeat):
            alone.append(await measure(endpoint, body, options.requests))
            routed.append(await measure(dispatched, body, options.requests))
        added = min(routed) - min(alone)
        print(f"{len(body):12} | {min(alone):13.1f} | {min(routed):17.1f} | {added:10.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=7)
    asyncio.run(main(parser.parse_args()))
