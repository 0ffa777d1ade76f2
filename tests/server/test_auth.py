"""Keys on every route, and what strangers get (reference cases A011 to A039, P12)."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from starlette.routing import Mount, Route
from starlette.websockets import WebSocket

from modulm.config import EngineConfig
from modulm.errors import ConfigError
from modulm.plugins import manager
from modulm_server import api_keys
from modulm_server.api_keys import Keys, read_keys
from modulm_server.auth import OPEN_PATHS, guard, open_paths
from modulm_server.flags import ServerConfig
from modulm_server.serve import banner, check_exposure
from modulm_server.testing import Live

ServerMaker = Callable[..., Live]

PATH = "/v1/chat/completions"
CHAT = {"model": "M", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}

KEY, OTHER = "a-key-of-ours", "another-key"
#: What scrapers of vLLM and probes expect to find open.
UNLOCKED = {*OPEN_PATHS, "/ping", "/metrics", "/version", "/load", "/openapi.json"}
#: The same as it is walked here.
WALKED = {path.replace("{file:path}", "file") for path in UNLOCKED}


@pytest.fixture(scope="module")
def locked(make_server: ServerMaker, tmp_path_factory: pytest.TempPathFactory) -> Live:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# keys\n{OTHER}\n\n")
    return make_server(api_key=(KEY,), api_key_file=str(file), root_path="/base")


def routes(live: Live) -> list[tuple[str, str]]:
    """Every method and path of the live route table."""
    pairs = []
    for route in live.served.api.router.routes:
        path = getattr(route, "path", None)
        assert path is not None, f"{route}: say here how a route of this kind is walked"
        plain = path.replace("{", "").replace("}", "").replace(":path", "")
        methods = sorted(getattr(route, "methods", None) or {"GET"})
        pairs += [(method, plain) for method in methods]
    return pairs


def test_a013_every_route_asks_for_a_key(locked: Live) -> None:
    walked = routes(locked)
    assert len(walked) > 10
    with locked.client() as client:
        for method, path in walked:
            expected = path not in WALKED
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "wrong"}):
                answer = client.request(method, path, headers=headers)
                assert (answer.status_code == 401) is expected, (method, path)
                if expected and method != "HEAD":
                    assert "API key" in str(answer.json()["error"]), "in the shape of its API"


def test_the_open_routes_are_these(locked: Live) -> None:
    assert {"/", "/page/{file:path}", "/health", "/ready"} == OPEN_PATHS
    assert open_paths(ServerConfig()) == UNLOCKED
    with locked.client() as client:
        for path in UNLOCKED:
            path = path.replace("{file:path}", "main.js")
            assert client.get(path).status_code == 200, path


def test_a_flag_says_what_is_open(make_server: ServerMaker) -> None:
    live = make_server(api_key=(KEY,), open_paths=("/server_info",))
    with live.client() as client:
        for path, status in (("/server_info", 200), ("/health", 200), ("/metrics", 401)):
            assert client.get(path).status_code == status, path
    with make_server(api_key=(KEY,), open_paths=("none",)).client() as client:
        assert client.get("/metrics").status_code == 401
    with pytest.raises(ConfigError, match="open_paths"):
        make_server(api_key=(KEY,), open_paths=("/metricks",))


def test_the_start_says_what_is_open() -> None:
    def said(**flags: Any) -> str:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            return banner(EngineConfig.from_keywords(**flags), manager.current(), sock)

    assert "no key for" not in said()
    (line,) = [line for line in said(api_key=(KEY,)).splitlines() if "no key for" in line]
    assert set(line.split()[3:]) == {path.partition("{")[0] for path in UNLOCKED}
    (line,) = [
        line
        for line in said(api_key=(KEY,), open_paths=("/metrics",)).splitlines()
        if "no key for" in line
    ]
    assert set(line.split()[3:]) == {"/", "/page/", "/health", "/ready", "/metrics"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer {OTHER}"},
        {"X-Api-Key": KEY},
    ],
)
def test_keys_that_are_known(locked: Live, headers: dict[str, str]) -> None:
    with locked.client() as client:
        assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.post(PATH, json=CHAT, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "value", ["", "Bearer", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"]
)
def test_keys_that_are_not(locked: Live, value: str) -> None:
    with locked.client() as client:
        assert client.get("/v1/models", headers={"Authorization": value}).status_code == 401


@pytest.mark.parametrize(
    "host",
    [
        "Host: a/health?x=",
        "Host: a?",
        "Host: a#",
        "Host: a\\health",
        "Host: ",
        "Host: a\r\nHost: b",
    ],
)  # fmt: skip
def test_a011_no_host_opens_a_route(locked: Live, host: str) -> None:
    reply = locked.raw(f"GET /v1/models HTTP/1.1\r\n{host}\r\nConnection: close\r\n\r\n".encode())
    assert reply.split(b" ")[1] in (b"400", b"401")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models", "/base/v1/models", "/base/base/v1/models", "//v1/models", "/v1/../v1/models",
        "/health/../v1/models", "/v1/models/", "/V1/models", "/v1%2fmodels", "/v1/models;/health",
    ],
)  # fmt: skip
def test_a014_no_path_opens_a_route(locked: Live, path: str) -> None:
    reply = locked.raw(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
    assert reply.split(b" ")[1] in (b"401", b"404")


def test_a015_cors_is_closed(live: Live, make_server: ServerMaker) -> None:
    headers = {"Origin": "https://evil.test", "Access-Control-Request-Method": "POST"}
    with live.client() as client:
        answer = client.options(PATH, headers=headers)
        assert "access-control-allow-origin" not in answer.headers
        answer = client.get("/v1/models", headers=headers)
        assert "access-control-allow-origin" not in answer.headers
    with make_server(allowed_origins=("https://good.test",)).client() as client:
        assert "access-control-allow-origin" not in client.options(PATH, headers=headers).headers
        answer = client.options(PATH, headers={**headers, "Origin": "https://good.test"})
        assert answer.headers["access-control-allow-origin"] == "https://good.test"


def test_credentials_for_everybody_are_refused(make_server: ServerMaker) -> None:
    with pytest.raises(ConfigError, match="allow_credentials"):
        make_server(allowed_origins=("*",), allow_credentials=True)


def test_a019_comparing_takes_no_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    names, compared = (b"first", b"second", b"third"), []
    compare = hmac.compare_digest

    def watched(sent: bytes, stored: bytes) -> bool:
        compared.append((sent, stored))
        return compare(sent, stored)

    monkeypatch.setattr(api_keys.hmac, "compare_digest", watched)
    keys = Keys(name.decode() for name in names)
    for key in (*names, b"firsT", b"other", b""):
        compared.clear()
        assert keys.knows(key) == (key in names)
        sent = sha256(key).digest()
        assert compared == [(sent, sha256(name).digest()) for name in names], "every key, hashed"


def test_keys_are_several_and_empty_ones_are_refused(tmp_path: Path) -> None:
    keys = Keys(["a", "b"])
    assert keys.knows(b"a")
    assert keys.knows(b"b")
    assert not keys.knows(b"")
    assert not Keys([])
    empty = tmp_path / "empty"
    empty.write_text("\n# nothing\n")
    for flags in ({"api_key_file": str(empty)}, {"api_key_file": "missing"}, {"api_key": (" ",)}):
        with pytest.raises(ConfigError):
            read_keys(EngineConfig.from_keywords(**flags).group(ServerConfig))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a036_not_on_loopback_without_a_key(host: str) -> None:
    def check(**flags: Any) -> None:
        check_exposure(EngineConfig.from_keywords(host=host, **flags).group(ServerConfig))

    with pytest.raises(ConfigError, match="--allow-unauthenticated"):
        check()
    check(api_key=("k",))
    check(allow_unauthenticated=True)


@pytest.mark.parametrize("host", [None, "127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_no_key(host: str | None) -> None:
    flags = {} if host is None else {"host": host}
    check_exposure(EngineConfig.from_keywords(**flags).group(ServerConfig))


@pytest.mark.parametrize(
    "path",
    [
        "/collective_rpc", "/sleep", "/wake_up", "/pause", "/update_weights",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache",
        "/dumper/configure", "/start_profile", "/stop_profile",
    ],
)  # fmt: skip
def test_a039_what_is_off_by_default_is_not_there(http: httpx.Client, path: str) -> None:
    assert http.post(path, json={}).status_code == 404
    assert http.get(path).status_code == 404


def test_a034_pages_can_be_switched_off(make_server: ServerMaker) -> None:
    with make_server(disable_fastapi_docs=True).client() as client:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert client.get(path).status_code == 404


def test_a038_the_key_is_nowhere_to_be_read(locked: Live, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    with caplog.at_level("DEBUG"), locked.client(headers=headers) as client:
        for path in ("/server_info", "/metrics", "/openapi.json"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert KEY not in answer.text
            assert OTHER not in answer.text
    assert not any(KEY in record.getMessage() for record in caplog.records)


def test_p12_routes_of_any_kind_are_locked() -> None:
    """Mounts, included routers and routes of plugins' own classes."""
    from starlette.responses import PlainTextResponse
    from starlette.routing import BaseRoute, Match
    from starlette.testclient import TestClient
    from starlette.websockets import WebSocketDisconnect

    async def hello(request: Any) -> PlainTextResponse:
        return PlainTextResponse("hello")

    class Odd(BaseRoute):
        def matches(self, scope: Any) -> Any:
            matches = scope["type"] == "http" and scope["path"] == "/odd"
            return (Match.FULL if matches else Match.NONE), {}

        async def handle(self, scope: Any, receive: Any, send: Any) -> None:
            await PlainTextResponse("odd")(scope, receive, send)

    inner = APIRouter()
    inner.add_api_route("/included", hello)
    app = FastAPI()
    app.include_router(inner)
    app.router.routes += [Odd(), Mount("/mount", routes=[Route("/in", hello)])]

    @app.websocket("/ws")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()

    guard(app.router.routes, Keys([KEY]))
    client = TestClient(app)
    good = {"Authorization": f"Bearer {KEY}"}
    for path in ("/odd", "/mount/in", "/included"):
        assert client.get(path).status_code == 401, path
        assert client.get(path, headers=good).status_code != 401, path
    assert client.get("/odd", headers=good).text == "odd"
    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/ws"):
        pass
    with client.websocket_connect("/ws", headers=good):
        pass
