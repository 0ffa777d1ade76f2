"""A real tokenizer, a scripted engine, and servers of both on free ports."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import jsonschema_rs
import pytest
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modulm.config import EngineConfig
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import QueueFull
from modulm.testing.checkpoints import make_tokenizer
from modulm_server.app import Served
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_server.testing import Live, serve_in_thread
from modulm_tokenizers.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=512))


def reply(prompt: str, params: Any) -> Reply:
    """The script of the shared server: the prompt says what is to be answered."""
    if len(prompt) > 1 << 16:  # to search it would hold the event loop
        return Reply("Hello there.")
    for word, answer in REPLIES.items():
        if word in prompt:
            return answer
    return Reply("Hello there.")


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
REPLIES = {
    "say nothing": Reply(""),
    "think first": Reply("<think>\nLet me see.\n</think>\n\nIt is 4."),
    "think between calls": Reply(
        "<think>\nFirst.\n</think>\n"
        + CALL
        + "\n<think>\nSecond.\n</think>\n"
        + CALL.replace("Paris", "Rome")
    ),
    "call two tools": Reply(CALL + "\n" + CALL.replace("Paris", "Rome")),
    "call what is not allowed": Reply(
        CALL.replace("get_weather", "get_time") + "\n" + CALL + "\nThat is all."
    ),
    "call a tool": Reply("I will look. " + CALL),
    "count slowly": Reply("1 2 3 4 5 6 7 8 9 ", delay=0.02, endless=True),
    "think long": Reply("Well", delay=0.9),
    "flood": Reply("1 2 3 4 5 6 7 8 9 ", endless=True),
    "queue is full": Reply(error_at=0, error=QueueFull("the queue is full")),
    "die in the middle": Reply("one two three four", die_at=3),
    "fail at once": Reply(error_at=0),
    "fail late": Reply("one two three four", error_at=3),
    "leak a secret": Reply(error_at=0, error=RuntimeError("secret /srv/private/x 0x7f00deadbeef")),
    "speak of emoji": Reply("🎈 été 你好"),
    "stop at END": Reply("before END after"),
    "named arguments": Reply('{"city": "Oslo"}'),
    "call in its own format": Reply(CALL.replace("Paris", "Bern")),
    "required calls": Reply('[{"name": "get_weather", "parameters": {"city": "Bern"}}]'),
}

ServerMaker = Callable[..., Live]


class Description:
    """/openapi.json, read so that a field which it does not name is wrong."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._paths = document["paths"]
        self._shapes = closed(document["components"])
        self._validators: dict[Any, Any] = {}

    def fault(self, path: str, method: str, status: int, media: str, value: Any) -> str | None:
        """What is wrong with an answer, or with one event of it."""
        answers = self._paths[path][method.lower()]["responses"]
        name = str(status) if str(status) in answers else f"{status // 100}XX"
        key = path, method, name, media
        if key not in self._validators:
            shape = answers.get(name, {}).get("content", {}).get(media, {}).get("schema")
            if shape is None:
                return f"{method} {path}: {status} with {media} is not described"
            whole = {**shape, "components": self._shapes}
            self._validators[key] = jsonschema_rs.validator_for(whole)
        error = next(self._validators[key].iter_errors(value), None)
        problem = None if error is None else f"{error.message} at {error.instance_path}"
        return (
            problem and f"{method} {path}: {status}, {media}: {problem[:600]}\n  {str(value)[:600]}"
        )


def closed(schema: Any) -> Any:
    """A schema whose objects have no other fields than those it names."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: closed(item) for key, item in schema.items()}
    if strict.get("type") == "object" and "properties" in strict:
        strict.setdefault("additionalProperties", False)
    return strict


class Watch:
    """Looks at what an application answers; `strays`: what was not as described."""

    strays: ClassVar[list[str]] = []
    #: Bytes of an answer that are looked at.
    most = 1 << 18

    def __init__(self, served: Served, description: Description) -> None:
        self._app, self._routes = served.app, served.api.router.routes
        self._description = description

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, media, body = 0, "", bytearray()

        async def seen(message: Message) -> None:
            nonlocal status, media
            if message["type"] == "http.response.start":
                status = message["status"]
                media = Headers(raw=message["headers"]).get("content-type", "").partition(";")[0]
            elif len(body) < self.most:
                body.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            if body and len(body) < self.most and scope["method"] != "HEAD":
                self._look(scope, status, media, bytes(body))

    def _look(self, scope: Scope, status: int, media: str, body: bytes) -> None:
        request_scope = {
            "type": "http",
            **{key: scope[key] for key in ("path", "method", "headers")},
        }
        route = next(
            (r for r in self._routes if r.matches(request_scope)[0] is Match.FULL and described(r)),
            None,
        )
        if route is None:
            return
        values: list[Any] = []
        if media == "application/json":
            values = [json.loads(body)]
        elif media == "text/event-stream":
            frames = [frame.rpartition(b"data: ")[2] for frame in body.split(b"\n\n")[:-1]]
            values = [json.loads(data) for data in frames if data.startswith(b"{")]
        elif media == "application/x-ndjson":
            values = [json.loads(line) for line in body.splitlines()]
        else:
            values = ["as it is"]
        for value in values:
            where = route.path_format, scope["method"], status, media
            fault = self._description.fault(*where, value)
            if fault is not None:
                self.strays.append(fault)


def described(route: Any) -> bool:
    return isinstance(route, APIRoute) and route.include_in_schema


@pytest.fixture(scope="session")
def watched() -> Callable[[Served], ASGIApp]:
    """What is put around the applications of this folder's servers."""
    descriptions: dict[Any, Description] = {}

    def watch(served: Served) -> ASGIApp:
        key = tuple(sorted(str(route) for route in served.api.router.routes))
        if key not in descriptions:
            descriptions[key] = Description(served.api.openapi())
        return Watch(served, descriptions[key])

    return watch


@pytest.fixture(autouse=True)
def as_described() -> Iterator[None]:
    """Each answer of these servers has the shape that /openapi.json gives it."""
    Watch.strays.clear()
    yield
    assert not Watch.strays, "\n".join(Watch.strays[:5])


class Servers:
    """Starts servers, which end with the test, module or session that starts them: one that waits
    has ten turns of its event loop in each second.
    """

    def __init__(self, tokenizer: Tokenizer, watched: Callable[[Served], ASGIApp]) -> None:
        self._tokenizer, self._watched = tokenizer, watched
        self._scopes: list[ExitStack] = []

    @contextmanager
    def scope(self) -> Iterator[None]:
        with ExitStack() as stack:
            self._scopes.append(stack)
            yield
            self._scopes.remove(stack)

    def start(
        self, info: dict[str, Any] | None = None, *, lasts: bool = False, **flags: Any
    ) -> Live:
        """Start a server with flags.

        info: changes to what the engine tells of itself. lasts: to the end of the session.
        """
        keywords = {"model": "M", "disable_uvicorn_access_log": True, **flags}
        config = EngineConfig.from_keywords(**keywords)
        facts = {"config": config, **(info or {})}
        engine = ScriptedEngine(self._tokenizer, reply, scripted_info(self._tokenizer, **facts))
        server = serve_in_thread(engine, config, self._watched)
        return self._scopes[0 if lasts else -1].enter_context(server)


@pytest.fixture(scope="session")
def server_scopes(tokenizer: Tokenizer, watched: Callable[[Served], ASGIApp]) -> Iterator[Servers]:
    made = Servers(tokenizer, watched)
    with made.scope():
        yield made


@pytest.fixture(scope="module", autouse=True)
def servers_of_a_module(server_scopes: Servers) -> Iterator[None]:
    with server_scopes.scope():
        yield


@pytest.fixture(autouse=True)
def servers_of_a_test(server_scopes: Servers) -> Iterator[None]:
    with server_scopes.scope():
        yield


@pytest.fixture(scope="session")
def make_server(server_scopes: Servers) -> ServerMaker:
    """See `Servers.start`."""
    return server_scopes.start


@pytest.fixture(scope="session")
def live(make_server: ServerMaker) -> Live:
    """The server that most tests share."""
    return make_server(
        lasts=True,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        enable_prompt_tokens_details=True,
        enable_tokenizer_info_endpoint=True,
    )


@pytest.fixture
def http(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client


#: A server of the scripted engine in a process of its own, as the command starts one.
PROCESS = """
import sys
from modulm.config import EngineConfig
from modulm_tokenizers.tokenizer import load_tokenizer
from modulm_server.app import create_app
from modulm_server.flags import ServerConfig
from modulm_server.logs import configure_logging
from modulm_server.output import unblock
from modulm_server.app import Served
from modulm_server.scripted import ScriptedEngine
from modulm_server.serve import make_server, open_socket

unblock()
config = EngineConfig.from_keywords(model="M", port=0, FLAGS)
configure_logging(config)
sock = open_socket(config.group(ServerConfig))
served = create_app(ScriptedEngine(load_tokenizer(sys.argv[1])), config)
server = make_server(served, config.group(ServerConfig))

def announce():
    ANNOUNCED
    with open(sys.argv[2], "w") as file:
        file.write(f"http://127.0.0.1:{sock.getsockname()[1]}")

server.announce = announce
server.run(sockets=[sock])
"""


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[bytes], str]]]:
    """Start a server in a process, its output in pipes that nobody reads: (process, URL).

    flags: keywords of the configuration, as code; announced: code that it runs when it is ready.
    """
    running: list[subprocess.Popen[bytes]] = []

    def start(flags: str = "", announced: str = "pass") -> tuple[subprocess.Popen[bytes], str]:
        where, script = tmp_path / "url", tmp_path / "serve.py"
        script.write_text(PROCESS.replace("FLAGS", flags).replace("ANNOUNCED", announced))
        folder = make_tokenizer(tmp_path / "tokenizer", vocab=512)
        popen = subprocess.Popen(
            [sys.executable, str(script), str(folder), str(where)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        running.append(popen)
        end = time.monotonic() + 300
        while not (where.exists() and where.read_text()):
            assert popen.poll() is None, popen.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)
        return popen, where.read_text()

    yield start
    for popen in running:
        popen.kill()
        popen.communicate()
