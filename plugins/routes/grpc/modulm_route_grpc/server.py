"""The gRPC server: vLLM's services, health checks and reflection."""

from __future__ import annotations

import asyncio
import ssl
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from modulm.errors import ConfigError, EngineError
from modulm_route_grpc.control import Control
from modulm_route_grpc.descriptors import handler_of
from modulm_route_grpc.http_calls import HttpCalls
from modulm_route_grpc.inference import Inference
from modulm_route_grpc.intake import Intake, message_limit
from modulm_route_grpc.vllm_engine import VllmEngine
from modulm_server.api_keys import read_keys
from modulm_server.flags import ServerConfig
from modulm_server.protocol import affordable

if TYPE_CHECKING:
    from modulm_server.route import RouteContext

__all__ = ["GrpcServer"]

log = getLogger("modulm_server")

_SERVICES = {
    "vllm.Inference": Inference,
    "vllm.Control": Control,
    "vllm.grpc.engine.VllmEngine": VllmEngine,
}
#: Seconds between two looks at the engine for grpc.health.v1.
_LOOK = 1.0
#: Seconds that calls have to end in when the server stops, after its requests have been drained.
_GRACE = 1.0
#: Options that let clients ping an idle connection, as they do while the engine works, but not
#: more than once a second.
_PINGS = (
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
)
#: Messages are not compressed: a small one could become a large one before it is counted.
_PLAIN = (("grpc.compression_enabled_algorithms_bitset", 1),)


class GrpcServer:
    """A running server. Create it on the event loop. port: that it listens on."""

    def __init__(self, context: RouteContext, address: tuple[str, int]) -> None:
        config = context.config.group(ServerConfig)
        credentials = _credentials(config)
        self._engine = context.engine
        most = affordable(config.max_connections)
        largest = message_limit(context.engine.info.max_model_len, config.max_request_bytes)
        patience = config.request_timeout
        self._server = grpc.aio.server(
            options=[
                *_PINGS,
                *_PLAIN,
                ("grpc.max_receive_message_length", largest),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_allowed_incoming_connections", most),
                ("grpc.so_reuseport", int((config.api_server_count or 1) > 1)),
                *([("grpc.server_handshake_timeout_ms", int(patience * 1000))] * (patience > 0)),
            ],
            interceptors=[
                Intake(read_keys(config), max(1, config.max_inflight_bytes // largest), patience)
            ],
            maximum_concurrent_rpcs=most,
        )
        calls = HttpCalls(context.loopback)
        handlers = [
            handler_of(name, service(context, calls)) for name, service in _SERVICES.items()
        ]
        self._server.add_generic_rpc_handlers(handlers)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self._server)
        self.port = self._bind(*address, credentials)
        self._starting: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    def _bind(self, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if credentials is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, credentials))

    async def start(self) -> None:
        """Take calls."""
        # In a task of its own, as is its stop: a server of grpcio's that is stopped when it has
        # begun to start, or whose stop does not end, ends the process (SIGSEGV).
        self._starting = asyncio.ensure_future(self._server.start())
        await asyncio.shield(self._starting)
        await self._report()
        self._watch = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        """Keep the status of grpc.health.v1 up to date."""
        while True:
            await asyncio.sleep(_LOOK)
            try:
                await self._report()
            except Exception:
                log.exception("The health of the gRPC services cannot be updated now")

    async def _report(self) -> None:
        status = health_pb2.HealthCheckResponse.SERVING
        try:
            await self._engine.check_health()
        except EngineError:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *_SERVICES):
            await self._health.set(name, status)

    async def stop(self) -> None:
        """End all calls and close the port."""
        try:
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.wait([self._watch])
            await self._health.enter_graceful_shutdown()
        finally:
            try:
                if self._starting is not None:
                    await asyncio.wait([self._starting])
            finally:
                await self._close()

    async def _close(self) -> None:
        stopping = asyncio.ensure_future(self._server.stop(_GRACE))
        try:
            await asyncio.shield(stopping)
        finally:
            await asyncio.wait([stopping])


def _credentials(server: ServerConfig) -> grpc.ServerCredentials | None:
    """The TLS files of the HTTP server; None without."""
    if server.ssl_certfile is None or server.ssl_keyfile is None:
        return None
    pair = Path(server.ssl_keyfile).read_bytes(), Path(server.ssl_certfile).read_bytes()
    roots = None if server.ssl_ca_certs is None else Path(server.ssl_ca_certs).read_bytes()
    needs_client = server.ssl_cert_reqs == ssl.CERT_REQUIRED
    if needs_client and roots is None:
        raise ConfigError("ssl_cert_reqs", "needs the clients' CA: set --ssl-ca-certs")
    return grpc.ssl_server_credentials([pair], roots, needs_client)
