"""Runs the server: binds the socket, starts the engine, serves until stopped."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import shlex
import signal
import socket
import ssl
import stat
import sys
import tempfile
import threading
import time
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import uvicorn
from starlette.routing import WebSocketRoute

from modulm.config.environ import variables
from modulm.config.schema.catalog import catalog
from modulm.errors import ConfigError, UnsupportedError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm_chat.conversation import load_template
from modulm_parsing.choice import parser_decisions, with_parsers
from modulm_server.api_keys import read_keys
from modulm_server.api_workers import Workers
from modulm_server.app import Served, create_app, served_names
from modulm_server.auth import open_paths
from modulm_server.engine.metrics import Metrics, ReplicaMetrics
from modulm_server.first_request import first_request
from modulm_server.flags import OtherProtocol, ServerConfig
from modulm_server.heap import bound_arenas, give_back, share_interpreter
from modulm_server.hosts import is_loopback
from modulm_server.loop_watch import LoopWatch
from modulm_server.protocol import affordable, protocol
from modulm_server.stats_log import Statistics, open_loggers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.engine_info import EngineInfo
    from modulm.plugins.manager import PluginManager
    from modulm_server.engine.client import EngineClient

__all__ = [
    "Server",
    "banner",
    "check_exposure",
    "check_files",
    "make_server",
    "open_socket",
    "run",
    "serve",
    "start_facts",
    "url_of",
    "with_http_address",
]

log = logging.getLogger("modulm_server")

#: Seconds that a server still answers after its engine died, so that running requests get their
#: error and /health shows the reason.
_LAST_WORDS = 3.0
#: Seconds for connections to close after the last request.
_CLOSING = 5.0
_BACKLOG = 2048
#: Maximum bytes of a WebSocket message.
_SOCKET_MESSAGE = 16 << 20
#: Turns of uvicorn's loop, a tenth of a second each, between two lines of statistics.
_STATS_TICKS = 100
#: Connections to accept per turn of the event loop.
_AT_ONCE = 8
#: Ticks of uvicorn, ten per second, between two releases of freed memory.
_TIDYING = 600


def run(config: EngineConfig) -> None:
    """Serve with `AsyncLLM`. Exits the process with a code other than 0 if the engine died."""
    from modulm_server.engine.async_llm import AsyncLLM

    code = serve(config, AsyncLLM.from_config, _print_error)
    if code:
        raise SystemExit(code)


def serve(
    config: EngineConfig,
    make_engine: Callable[[EngineConfig], EngineClient],
    announce: Callable[[str], None],
) -> int:
    """Serve until SIGTERM, SIGHUP or Ctrl-C; returns the exit code of the process.

    Binds the address and finds the checkpoint before starting the engine, so that a used port or
    a wrong model name fails at once. Connections are refused until the model is ready. announce:
    called with the banner. Raises ConfigError for an address that cannot be used or needs a key,
    CheckpointError for a missing model.
    """
    check_exposure(config.group(ServerConfig))
    check_files(config.group(ServerConfig))
    bound_arenas(variables())
    config = with_http_address(config)
    share_interpreter()
    sock = open_socket(config.group(ServerConfig))
    try:
        plugins = manager.current()
        open_checkpoint(config, plugins)
        parsers = parser_decisions(config, plugins)
        config = with_parsers(config, parsers)
        engine = make_engine(config)
        try:
            served = create_app(engine, config)
            server = make_server(served, config.group(ServerConfig))
            facts = [
                *start_facts(engine.info, len(engine.replicas) or 1),
                *(f"{d.subject}: {d.winner or 'none'} ({d.reason})" for d in parsers),
            ]
            suggested = _suggested_request(engine, config)
            server.announce = lambda: announce(banner(config, plugins, sock, facts, suggested))
            with _open_workers(config.group(ServerConfig), sock, engine) as workers:
                server.workers = workers
                gc.freeze()  # makes full garbage collections faster
                server.serve_on(sock)
            return 1 if engine.dead or server.failed else 0
        finally:
            engine.shutdown()
    finally:
        sock.close()
        uds = config.group(ServerConfig).uds
        if uds is not None:
            Path(uds).unlink(missing_ok=True)


def _open_workers(
    server: ServerConfig, sock: socket.socket, engine: EngineClient
) -> AbstractContextManager[Workers | None]:
    """Start the additional server processes of `--api-server-count`."""
    count = (server.api_server_count or 1) - 1
    if not count:
        return nullcontext()
    if engine.address is None:
        raise ConfigError(
            "api_server_count",
            "several server processes need the engine in a separate process: remove "
            "--disable-frontend-multiprocessing",
        )
    return Workers(count, sock, engine.address, server.shutdown_timeout)


def _print_error(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def check_exposure(server: ServerConfig) -> None:
    """Raise ConfigError for a server without a key on a public address."""
    if server.uds is not None or server.allow_unauthenticated or read_keys(server):
        return
    if not is_loopback(server.host or "127.0.0.1"):
        raise ConfigError(
            "api_key",
            f"{server.host} is reachable from other machines: set --api-key or --api-key-file, or "
            "--allow-unauthenticated",
        )


def check_files(server: ServerConfig) -> None:
    """Raise ConfigError for TLS files or a chat template that cannot be used."""
    if server.chat_template is not None:
        load_template(server.chat_template)
    if server.ssl_certfile is None:
        if server.ssl_keyfile is not None:
            raise ConfigError("ssl_keyfile", "needs a certificate: set --ssl-certfile")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        files = " and ".join(filter(None, (server.ssl_certfile, server.ssl_keyfile)))
        raise ConfigError("ssl_certfile", f"{files} cannot be used: {error}") from error
    if server.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(server.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                "ssl_ca_certs", f"{server.ssl_ca_certs} cannot be used: {error}"
            ) from error


def with_http_address(config: EngineConfig) -> EngineConfig:
    """Give HTTP a Unix socket if another protocol listens on `--port` (`OtherProtocol`).

    Raises ConfigError if the port cannot be used.
    """
    server = config.group(ServerConfig)
    groups = [group.cls for group in catalog().groups if issubclass(group.cls, OtherProtocol)]
    if server.uds is not None or not any(config.group(group).takes_port for group in groups):
        return config
    open_socket(server).close()
    path = Path(tempfile.gettempdir()) / f"modulm-{os.getpid()}.sock"
    return config.with_(uds=str(path))


def open_socket(server: ServerConfig) -> socket.socket:
    """Bind a socket to the configured address. Raises ConfigError if that fails."""
    if server.uds is not None:
        return _unix_socket(server.uds)
    host = server.host or "127.0.0.1"
    try:
        addresses = socket.getaddrinfo(
            host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise ConfigError("host", f"{host!r} is not an address of this machine: {error}") from error
    family, kind, protocol, _, address = addresses[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _unusable(host, server.port, error) from error
    sock.set_inheritable(False)
    return sock


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError("port", f"{host}:{port} is in use: choose another port with --port")
    if error.errno == errno.EACCES:
        return ConfigError("port", f"{port} needs privileges: choose one above 1023 with --port")
    return ConfigError("host", f"cannot listen on {host}:{port}: {error.strerror}")


def _unix_socket(path: str) -> socket.socket:
    """Bind a Unix socket. Replaces a stale socket, but no other file."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).exists():
            if not stat.S_ISSOCK(os.stat(path).st_mode) or _answers(path):
                raise ConfigError("uds", f"{path} is in use: choose another path")
            Path(path).unlink()
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError("uds", f"cannot listen on {path}: {error.strerror}") from error
    except ConfigError:
        sock.close()
        raise
    return sock


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _suggested_request(engine: EngineClient, config: EngineConfig) -> tuple[str, str]:
    """The sample request for the banner."""
    if config.group(ServerConfig).tokens_only:
        return "/inference/v1/generate", json.dumps({"token_ids": [1, 2, 3]})
    tokenizer = engine.tokenizer
    chats = config.group(ServerConfig).chat_template is not None or (
        tokenizer is not None and (tokenizer.chat is not None or bool(tokenizer.chat_template))
    )
    speaks = bool(engine.info.limit("speech", "rate"))
    return first_request(served_names(config)[0], engine.info.tasks, chats, speaks)


def banner(
    config: EngineConfig,
    plugins: PluginManager,
    sock: socket.socket,
    facts: Sequence[str] = (),
    suggested: tuple[str, str] | None = None,
) -> str:
    """The text that the server prints when it is ready.

    facts: lines about the engine and its parsers. suggested: path and body of a sample request, by
    default a chat.
    """
    server, model = config.group(ServerConfig), served_names(config)[0]
    path, body = suggested or first_request(model, ("generate",))
    url = url_of(server, sock)
    option = "" if server.uds is None else f" --unix-socket {server.uds}"
    keys = bool(read_keys(server))
    key = ' -H "Authorization: Bearer $KEY"' if keys else ""
    open_to_all = " ".join(path.partition("{")[0] for path in sorted(open_paths(server)))
    unlocked = f"  no key for  {open_to_all}\n" if keys else ""
    header = plugins.gather("modulm_report_header", config=config)
    page = "chat page  " if path.startswith("/v1/c") else "page       "
    return (
        f"{model} is served at {url}\n"
        + "".join(f"  {line}\n" for line in header)
        + "".join(f"  {line}\n" for line in facts)
        + unlocked
        + ("" if server.tokens_only else f"  {page} {url}/\n")
        + f"  try         curl{option} {url}{path}{key} -H 'Content-Type: application/json' "
        f"-d {shlex.quote(body)}\n"
        "  stop        Ctrl-C"
    )


def url_of(server: ServerConfig, sock: socket.socket) -> str:
    """The URL of the server; behind a Unix socket the host does not matter."""
    if server.uds is not None:
        return "http://localhost"
    scheme = "http" if server.ssl_certfile is None else "https"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def start_facts(info: EngineInfo, replicas: int = 1) -> list[str]:
    """Lines about the engine: device, weights, kernels and cache."""
    description = info.description
    won = {d.subject.partition(" ")[0]: d.winner or "none" for d in description.decisions}
    quantization = won.get("quantization", "none")
    cache = [f"{info.cache_tokens} tokens"] if info.cache_tokens else []
    return [
        f"device: {description.platform}"
        + (f" ({description.device})" if description.device else ""),
        f"weights: {info.dtype}, {description.weight_bytes >> 20} MiB, quantization {quantization}",
        f"kernels: {won.get('kernels', 'none')}; attention {won.get('attention', 'none')}",
        f"cache: {', '.join([*cache, f'context {info.max_model_len}'])}",
        *([f"replicas: {replicas}, each as above"] if replicas > 1 else []),
    ]


class Server(uvicorn.Server):
    """A uvicorn server that drains before shutdown and watches the engine."""

    def __init__(self, config: uvicorn.Config, served: Served, patience: float) -> None:
        super().__init__(config)
        self._served = served
        self._patience = patience
        self._certificates: _Certificates | None = None
        self._died: float | None = None
        self.announce: Callable[[], None] = lambda: None
        self.stats: Statistics | None = None
        self.workers: Workers | None = None
        self.failed = False
        self._sockets: list[socket.socket] | None = None
        self._loop_watch = LoopWatch()

    def watch(self, certificates: _Certificates) -> None:
        """Reload TLS files when they change."""
        self._certificates = certificates

    def serve_on(self, sock: socket.socket) -> None:
        """Serve requests from the socket, and close it at the end.

        Listens on several duplicates of it: libuv accepts one connection per socket and turn, and
        a health check would wait for all connections before it.

        The socket must be non-blocking first: blocking is a property of the socket, not of a
        descriptor, and other processes that accept from it would block too.
        """
        sock.setblocking(False)
        with ExitStack() as stack:  # uvicorn closes none if the server does not start
            sockets = [stack.enter_context(sock)]
            while len(sockets) < _AT_ONCE:
                sockets.append(stack.enter_context(sock.dup()))
            self.run(sockets=sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._sockets = sockets
        await super().startup(sockets)
        if not self.started:
            return
        try:
            await self._served.start()
            self._loop_watch.start()
            self.announce()
        except BaseException:  # uvicorn would leave connections, and what has started
            await self.shutdown(sockets)
            raise

    async def main_loop(self) -> None:
        """Serve until the end, which an error does not skip."""
        try:
            await super().main_loop()
        except BaseException:
            await self.shutdown(self._sockets)
            raise

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Drain on SIGHUP too, which a terminal sends when it closes. nohup has it ignored.

        SIGUSR2 restarts the replicas one after another.
        """
        previous = signal.getsignal(signal.SIGHUP)
        on_main_thread = threading.current_thread() is threading.main_thread()
        if previous is signal.SIG_IGN or not on_main_thread:
            with super().capture_signals():
                yield
            return
        signal.signal(signal.SIGHUP, self.handle_exit)
        restarting = signal.signal(signal.SIGUSR2, self._handle_restart)
        try:
            with super().capture_signals():
                yield
        finally:
            signal.signal(signal.SIGHUP, previous)
            signal.signal(signal.SIGUSR2, restarting)

    def _handle_restart(self, sig: int, frame: FrameType | None) -> None:
        try:
            self._served.generation.engine.rolling_restart()
        except UnsupportedError as error:
            log.error("SIGUSR2 does nothing: %s", error)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal starts the shutdown; a second Ctrl-C forces it."""
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        self._loop_watch.tick()
        if self._served.generation.engine.dead:
            self._died = self._died or time.monotonic()
            if time.monotonic() > self._died + _LAST_WORDS:
                return True
        if self._certificates is not None and counter % 10 == 0:
            self._certificates.refresh()
        if self.stats is not None and counter % _STATS_TICKS == 0:
            self.stats.look(time.monotonic())
        if self.workers is not None and counter % 10 == 0 and not self.workers.check():
            self.failed = True
            return True
        if counter % _TIDYING == _TIDYING - 1 and self._served.generation.engine.address:
            # Not with an engine in this process: it would release the pages of its activations.
            asyncio.get_running_loop().run_in_executor(None, give_back)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop_watch.stop()
        self._served.generation.closing = True
        try:
            await self._end_requests()
        finally:
            await super().shutdown(sockets)
            if self.stats is not None:
                await asyncio.to_thread(self.stats.close)

    async def _end_requests(self) -> None:
        """Let running requests end, then stop what serves them, also if waiting for them fails."""
        engine = self._served.generation.engine
        try:
            if self.workers is not None:
                self.workers.end()
            if not self.force_exit and not engine.dead:
                await engine.drain(self._patience)
        finally:
            await self._served.stop()
        for _ in range(20):
            if not engine.active:
                break
            await asyncio.sleep(0.05)


def make_server(served: Served, server: ServerConfig) -> Server:
    """Create the server of an application, with limits on connections."""
    log = server.uvicorn_log_level
    config = uvicorn.Config(
        served.app,
        http=_bounded(server),
        ws=_socket_protocol(served),
        ws_max_size=_SOCKET_MESSAGE,
        ws_per_message_deflate=False,  # a few bytes would become a long message
        lifespan="off",
        log_config=None,
        log_level=log,
        access_log=not server.disable_uvicorn_access_log,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=round(_CLOSING),
        h11_max_incomplete_event_size=server.h11_max_incomplete_event_size,
        root_path=server.root_path or "",
        ssl_keyfile=server.ssl_keyfile,
        ssl_certfile=server.ssl_certfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_cert_reqs=server.ssl_cert_reqs,
        ssl_ciphers=server.ssl_ciphers or "TLSv1.2+HIGH:!aNULL",
    )
    uvicorn_server = Server(config, served, server.shutdown_timeout)
    metrics = served.generation.engine.metrics
    if (
        isinstance(metrics, Metrics | ReplicaMetrics)
        and not served.generation.config.observability.disable_log_stats
    ):
        loggers = open_loggers(served.generation.config, manager.current())
        uvicorn_server.stats = Statistics(metrics, loggers)
    if server.enable_ssl_refresh and server.ssl_certfile and server.ssl_keyfile:
        config.load()
        uvicorn_server.watch(_Certificates(config.ssl, server.ssl_certfile, server.ssl_keyfile))
    return uvicorn_server


def _socket_protocol(served: Served) -> type[asyncio.Protocol] | Literal["none"]:
    """The protocol of WebSockets, imported only if a route is one."""
    if not any(isinstance(route, WebSocketRoute) for route in served.api.router.routes):
        return "none"
    from modulm_server.websocket_protocol import WebSocketProtocol

    return WebSocketProtocol


def _bounded(server: ServerConfig) -> type[asyncio.Protocol]:
    return protocol(
        server.h11_max_incomplete_event_size or 1 << 16,
        server.request_timeout,
        affordable(server.max_connections),
    )


class _Certificates:
    """Reloads TLS files when one of them changes. An invalid pair is ignored."""

    def __init__(self, context: ssl.SSLContext | None, certificate: str, key: str) -> None:
        self._context = context
        self._files = (certificate, key)
        self._seen = self._stamp()

    def _stamp(self) -> tuple[int, ...]:
        return tuple(Path(file).stat().st_mtime_ns for file in self._files)

    def refresh(self) -> None:
        """Reload the files if they changed."""
        try:
            stamp = self._stamp()
            if stamp != self._seen and self._context is not None:
                self._context.load_cert_chain(*self._files)
                self._seen = stamp
        except (OSError, ssl.SSLError):
            return
