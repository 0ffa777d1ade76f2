"""Test tools for route packages: a real server on a free port, around any engine, and the contract
kit.

    from modulm_server.testing import check_routes

    def test_contract():
        check_routes(MyRoutes)
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
from attrs import define, evolve
from starlette.types import ASGIApp

from modulm.config import EngineConfig
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tokenizer
from modulm.testing.kit import KitNotRun
from modulm_server.app import ModelHost, Served, create_app
from modulm_server.auth import OPEN_PATHS
from modulm_server.flags import ServerConfig
from modulm_server.route import RouteFamily
from modulm_server.scripted import ScriptedEngine
from modulm_server.serve import make_server, open_socket
from modulm_tokenizers.tokenizer import load_tokenizer

__all__ = ["Live", "check_routes", "error_of", "serve_in_thread"]


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
    Raises the error with which the server does not start.
    """
    config = config.with_(host="127.0.0.1", port=0)
    served = create_app(engine, config, host)
    if watch is not None:
        served = evolve(served, app=watch(served))
    sock = open_socket(config.group(ServerConfig))
    server = make_server(served, config.group(ServerConfig))
    loops: list[asyncio.AbstractEventLoop] = []
    server.announce = lambda: loops.append(asyncio.get_running_loop())
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.serve_on(sock)
        except BaseException as error:
            failures.append(error)
            if loops:
                raise

    thread = threading.Thread(target=run, name="test-server")
    thread.start()
    try:
        while not loops and thread.is_alive():
            threading.Event().wait(0.01)
        if not loops:
            raise failures[0]
        url = "http://localhost" if isinstance(sock.getsockname(), str) else _url(sock)
        yield Live(url, engine, served, loops[0])
    finally:
        server.should_exit = True
        thread.join(300)
        sock.close()


def _url(sock: socket.socket) -> str:
    return f"http://127.0.0.1:{sock.getsockname()[1]}"


_KEY = "key-of-the-kit"
#: Bodies that no route accepts as they are.
_BODIES = (b"", b"{", b"[]", b"null", b"5", b'{"no_such_field": {"a": [1]}}', b"\xff\xfe")
_PARAMETER = re.compile(r"{[^}]*}")


def check_routes(driver: type[RouteFamily], **flags: Any) -> None:
    """Run the contract kit for route families on a real server. flags: of the engine.

    Every route needs a key, answers malformed bodies with a client's error, and leaves the server
    answering. Raises AssertionError with what was expected, KitNotRun for a family that is not
    served with these flags.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(make_tokenizer(folder))
    config = EngineConfig.from_keywords(api_key=[_KEY], **flags)
    plugins, name = manager.current(), driver.name
    registered = [d for d in plugins.names("routes") if d.name == name and d.source == "registered"]
    if registered:
        plugins.unregister("routes", name)
    plugins.register("routes", name, driver)
    try:
        with serve_in_thread(ScriptedEngine(tokenizer), config) as live, live.client() as client:
            _check_family(driver, live, client)
    finally:
        plugins.unregister("routes", name)
        for declared in registered:
            plugins.register("routes", name, declared.driver or declared.target)


def _check_family(driver: type[RouteFamily], live: Live, client: httpx.Client) -> None:
    family = next((f for f in live.served.families if type(f) is driver), None)
    if family is None:
        context = live.served.families[0].context
        reason = driver(context).absent()
        assert reason is None or (isinstance(reason, str) and reason), f"absent() gave {reason!r}"
        if reason is not None:
            raise KitNotRun(f"it is not served: {reason}")
        driver(context).router()
        raise AssertionError("the server left the family out: see its log")
    routes = list(_endpoints(family))
    assert routes, "router() has no routes"
    twice = {route for route in routes if routes.count(route) > 1}
    assert not twice, f"routes are declared twice: {sorted(twice)}"
    for method, path in routes:
        _check_endpoint(client, method, path)
    described = client.get("/openapi.json", headers={"Authorization": f"Bearer {_KEY}"})
    assert described.status_code in (200, 404), f"/openapi.json: {described.text[:300]}"
    for _ in range(2):
        for call in (family.stop, family.start):
            asyncio.run_coroutine_threadsafe(call(), live.loop).result(60)
    assert client.get("/health").is_success, "the server is not healthy after these requests"


def _endpoints(family: RouteFamily) -> Iterator[tuple[str, str]]:
    for route in family.router().routes:
        path = getattr(route, "path", None)
        assert path, f"{route!r} has no path"
        assert path.startswith("/"), f"path {path!r} does not start with a slash"
        for method in sorted(getattr(route, "methods", None) or ()):
            yield method, path


def _check_endpoint(client: httpx.Client, method: str, path: str) -> None:
    title, url = f"{method} {path}", _PARAMETER.sub("x", path)
    bodies = _BODIES if method in ("POST", "PUT", "PATCH") else (b"",)
    if path not in OPEN_PATHS and not path.startswith("/page"):
        refused = client.request(method, url, content=bodies[-1])
        assert refused.status_code == 401, (
            f"{title} answers {refused.status_code} without a key: 401 was expected"
        )
    for body in bodies:
        headers = {"Authorization": f"Bearer {_KEY}", "Content-Type": "application/json"}
        answer = client.request(method, url, content=body, headers=headers)
        assert answer.status_code < 500 or answer.status_code in (501, 503), (
            f"{title} answers {answer.status_code} to {body!r}: {answer.text[:300]}"
        )
        if answer.is_error and method != "HEAD":
            assert answer.content, f"{title} gives an error without a body"
            private = _PRIVATE.search(answer.text)
            assert not private, f"{title} tells clients about the machine: {answer.text[:300]}"
    if len(bodies) > 1:
        headers = {"Authorization": f"Bearer {_KEY}"}
        broken = client.request(method, url, content=b"{", headers=headers)
        assert broken.is_client_error, f"{title} accepts a body that is no JSON"
