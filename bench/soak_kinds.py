"""What the soak's clients ask for: one method for each kind of request, which checks its answer."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from attrs import define
from harness import Client, Refused, Reply, form
from PIL import Image

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


#: Error codes of requests that an engine's death cut off.
CUT = frozenset({"replica_died", "engine_restarting", "engine_dead"})


class Wrong(Exception):
    """An answer is wrong."""


class Cut(Exception):
    """The engine died while it ran the request, or was being restarted."""


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
    """Return a 200's JSON. Raises Refused if a queue is full, Cut if the engine died, or Wrong."""
    if reply.status == 429:
        raise Refused(reply)
    if reply.status == 503:
        cut(reply.body)
    need(reply.status == 200, f"{reply.status}: {reply.body[:300]!r}")
    return reply.json()


def cut(body: bytes) -> None:
    """Raise Cut if an error says that the engine died."""
    if b'"error"' in body:
        error = json.loads(body)["error"]
        if error.get("code") in CUT:
            raise Cut(error["code"])


def picture(rng: random.Random) -> str:
    """An image of random size and colour as a data URL."""
    size = rng.randrange(8, 300), rng.randrange(8, 300)
    colour = rng.randrange(256), rng.randrange(256), rng.randrange(256)
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, rng.choice(("PNG", "JPEG", "WEBP")))
    return f"data:image/*;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@define(eq=False)
class Caller:
    """A client that sends one request after another."""

    chat: Client
    embed: Client
    media: Client
    rng: random.Random
    adapters: dict[str, Path]
    number: int

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
                cut(data)
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
            async for data in source:
                cut(data)
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
        cut(reply.body)
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
        try:
            await self._batch_of(kept["id"], count)
        finally:
            await self.chat.ask("DELETE", f"/v1/files/{kept['id']}")

    async def _batch_of(self, file: str, count: int) -> None:
        asked = {"input_file_id": file, "endpoint": "/v1/chat/completions",
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

    async def image(self) -> None:
        """Ask about one or two images; some streams are left."""
        urls = [picture(self.rng) for _ in range(self.rng.randrange(1, 3))]
        content = [
            {"type": "text", "text": self.rng.choice(WORDS)},
            *({"type": "image_url", "image_url": {"url": url}} for url in urls),
        ]
        body = {"model": "M", "messages": [{"role": "user", "content": content}],
                "max_tokens": self.rng.randrange(1, 40)}  # fmt: skip
        if self.rng.random() < 0.3:
            source = self.media.stream("/v1/chat/completions", {**body, "stream": True})
            try:
                async for _ in source:
                    break
            finally:
                await source.aclose()
            return
        found = good(await self.media.ask("POST", "/v1/chat/completions", body))
        need(found["usage"]["prompt_tokens"] > 16, "an image without tokens")

    async def bad_image(self) -> None:
        data = base64.b64decode(picture(self.rng).partition(",")[2])
        broken = base64.b64encode(data[: self.rng.randrange(1, 30)]).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{broken}"}}
        body = {"model": "M", "messages": [{"role": "user", "content": [part]}]}
        reply = await self.media.ask("POST", "/v1/chat/completions", body)
        cut(reply.body)
        need(reply.status in (400, 429), f"a bad image: {reply.status} {reply.body[:300]!r}")

    async def adapter(self) -> None:
        """Load an adapter under a name of this client, use it, replace it, and unload it."""
        which = self.rng.choice(("chat", "media"))
        client: Client = getattr(self, which)
        name = f"a{self.number}"
        body = {"lora_name": name, "lora_path": str(self.adapters[which] / f"a{self.number % 4}")}
        asked = {"model": name, "prompt": self.rng.choice(WORDS), "max_tokens": 12}
        loaded = await client.ask("POST", "/v1/load_lora_adapter", body)
        cut(loaded.body)
        need(loaded.status == 200, f"load: {loaded.status} {loaded.body[:300]!r}")
        try:
            good(await client.ask("POST", "/v1/completions", asked))
            if self.rng.random() < 0.5:
                again = {**body, "load_inplace": True}
                good(await client.ask("POST", "/v1/completions", asked))
                cut((await client.ask("POST", "/v1/load_lora_adapter", again)).body)
                good(await client.ask("POST", "/v1/completions", asked))
        finally:
            left = await client.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
            cut(left.body)
            need(left.status == 200, f"unload: {left.status} {left.body[:300]!r}")

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
    "images": (Caller.image, 15),
    "bad images": (Caller.bad_image, 3),
    "adapters": (Caller.adapter, 8),
    "nonsense": (Caller.nonsense, 10),
    "looks": (Caller.look, 5),
}
