"""Memory of a server whose clients send media to fill it: python bench/media_memory.py

stalled   one request names eight files of a server that sends 160 MB of each and then nothing
pixels    eight requests at once with a PNG of 8,000 x 8,000 pixels, 192 MB each when decoded

Prints the most anonymous memory of all the server's processes above what they had at rest, beside
the budget (`--max-inflight-media-bytes`), and how the requests ended.
"""

from __future__ import annotations

import asyncio
import base64
import io
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from harness import Client, Held, Server, serving
from PIL import Image
from soak_models import write_llava

BUDGET = 256 << 20
CHAT = "/v1/chat/completions"
_SENT = 160 << 20


def body(urls: list[str]) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "M", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}


async def send_and_stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    try:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nConnection: close\r\n\r\n")
        for _ in range(_SENT >> 20):
            writer.write(bytes(1 << 20))
            await writer.drain()
        await asyncio.sleep(600)
    except ConnectionError:
        return
    finally:
        writer.close()


async def most_memory(server: Server, requests: list[dict[str, Any]]) -> str:
    """Send the requests at once, and look at the memory until all have ended."""
    rest = Held.by(server.family()).memory
    client, most = Client(server.port), rest
    asked = [asyncio.ensure_future(client.ask("POST", CHAT, request)) for request in requests]
    while not all(one.done() for one in asked):
        most = max(most, Held.by(server.family()).memory)
        await asyncio.sleep(0.02)
    ends = Counter(one.result().status for one in asked)
    return f"{(most - rest) / 1024:7.0f} MiB above rest, {dict(ends)}"


async def attack(server: Server) -> None:
    listener = await asyncio.start_server(send_and_stall, "127.0.0.2", 0)
    port = listener.sockets[0].getsockname()[1]
    urls = [f"http://127.0.0.2:{port}/{number}.png" for number in range(8)]
    file = io.BytesIO()
    Image.new("RGB", (8000, 8000)).save(file, "PNG")
    picture = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    print(f"budget  {BUDGET >> 20:7} MiB")
    print("stalled", await most_memory(server, [body(urls)]), flush=True)
    print("pixels ", await most_memory(server, [body([picture])] * 8), flush=True)
    listener.close()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="media-") as folder:
        model = write_llava(Path(folder) / "llava")
        flags = (
            "--max-inflight-media-bytes", str(BUDGET), "--allowed-media-networks", "127.0.0.2/32",
            "--limit-mm-per-prompt", '{"image": 8}', "--cpu-threads", "1",
            "--num-gpu-blocks-override", "256", "--request-timeout", "30",
        )  # fmt: skip
        with serving(*flags, model=str(model)) as server:
            asyncio.run(attack(server))


if __name__ == "__main__":
    main()
