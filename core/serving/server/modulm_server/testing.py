"""Test tools for route packages: a real server on a free port, around any engine."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
from attrs import define, evolve
from starlette.types import ASGIApp

from modulm.config import EngineConfig
from modulm_server.app import ModelHost, Served, create_app
from modulm_server.flags import ServerConfig
from modulm_server.serve import make_server, open_socket

__all__ = ["Live", "error_of", "serve_in_thread"]


@define(eq=False)
class Live:
    """A running server. loop: the event loop of its thread."""

    url: str
    engine: Any
    served: Served
    loop: asyncio.AbstractEventLoop

    def client(self, **options: Any) -> httpx.Client:
        """Create a client of this server. Close it, or use it in a `with` statement.

        For TLS pass `verify`; the default trusts nothing, as loading certificates takes 20 ms.
        """
        return httpx.Client(**{"base_url": self.url, "timeout": 300, "verify": _NOBODY, **options})

    def raw(self, data: bytes, wait: float = 60.0) -> bytes:
        """Send bytes; returns the response, up to its end or `wait` seconds of silence."""
        where = urlsplit(self.url)
        received = b""
        with socket.create_connection((where.hostname, where.port), timeout=wait) as sock:
            try:
                sock.sendall(data)
                while piece := sock.recv(65536):
                    received += piece
            except (TimeoutError, ConnectionError):
                return received
        return received

    def abandon(self, path: str, *, requests: int = 1, **content: Any) -> None:
        """POST and disconnect once the engine runs `requests` requests of it."""

        async def ask() -> None:
            async with httpx.AsyncClient(base_url=self.url, timeout=300, verify=_NOBODY) as client:
                answer = asyncio.ensure_future(client.post(path, **content))
                while self.engine.active < requests and not answer.done():
                    await asyncio.sleep(0.005)
                if answer.done():
                    raise RuntimeError(f"answered at once: {answer.result().text}")
                answer.cancel()

        asyncio.run(ask())


#: Trusts no certificate.
_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
#: Details of the machine: addresses, tracebacks, paths.
_PRIVATE = re.compile(r"0x[0-9a-f]{6,}|Traceback|site-packages|/root|/home|/tmp/|\.py\b")


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response. Checks for OpenAI's shape and for leaked details of the machine."""
    body = response.json()
    assert set(body) == {"error"}, body
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["message"]
    assert not _PRIVATE.search(response.text), response.text
    return error


@contextmanager
def serve_in_thread(
    engine: Any,
    config: EngineConfig,
    watch: Callable[[Served], ASGIApp] | None = None,
    host: ModelHost | None = None,
) -> Iterator[Live]:
    """Run a real server on a free loopback port, or on the Unix socket of `--uds`.

    watch: wraps the application, to observe its traffic. host: of a server of several models.
    """
    config = config.with_(host="127.0.0.1", port=0)
    served = create_app(engine, config, host)
    if watch is not None:
        served = evolve(served, app=watch(served))
    sock = open_socket(config.group(ServerConfig))
    server = make_server(served, config.group(ServerConfig))
    loops: list[asyncio.AbstractEventLoop] = []
    server.announce = lambda: loops.append(asyncio.get_running_loop())
    thread = threading.Thread(target=server.serve_on, args=(sock,), name="test-server")
    thread.start()
    try:
        while not loops and thread.is_alive():
            threading.Event().wait(0.01)
        url = "http://localhost" if isinstance(sock.getsockname(), str) else _url(sock)
        yield Live(url, engine, served, loops[0])
    finally:
        server.should_exit = True
        thread.join(300)
        sock.close()


def _url(sock: socket.socket) -> str:
    return f"http://127.0.0.1:{sock.getsockname()[1]}"
