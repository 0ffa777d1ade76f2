"""The route family that starts the gRPC server with the HTTP server, and stops it with it."""

from __future__ import annotations

from logging import getLogger
from typing import TYPE_CHECKING

from fastapi import APIRouter

from modulm.errors import ConfigError
from modulm_route_grpc.flags import GrpcConfig
from modulm_server.flags import ServerConfig
from modulm_server.route import RouteFamily

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm_route_grpc.server import GrpcServer

__all__ = ["Grpc", "address_of"]

log = getLogger("modulm_server")


def address_of(config: EngineConfig) -> tuple[str, int]:
    """The host and port of the gRPC server; 0: any free port."""
    server, flags = config.group(ServerConfig), config.group(GrpcConfig)
    port = server.port if flags.grpc else flags.grpc_port or 0
    return server.host or "127.0.0.1", port


class Grpc(RouteFamily):
    """vLLM's gRPC services, with --grpc or --grpc-port. They answer through the other routes, so
    that keys and limits apply. server: while it runs.
    """

    name = "grpc"
    api = 2
    shared_paths = ("*",)
    token_paths = ("*",)
    server: GrpcServer | None = None

    def absent(self) -> str | None:
        on = self.context.config.group(GrpcConfig).on
        return None if on else "neither --grpc nor --grpc-port is set"

    def router(self) -> APIRouter:
        self._check()
        return APIRouter()

    def _check(self) -> None:
        """Raise ConfigError for flags that do not go together, and an address in use."""
        from modulm_server.serve import check_exposure, open_socket

        config = self.context.config
        server, flags = config.group(ServerConfig), config.group(GrpcConfig)
        if flags.grpc and flags.grpc_port is not None:
            raise ConfigError("grpc_port", "cannot be combined with grpc, which uses --port")
        host, port = address_of(config)
        address = config.with_(uds=None, host=host, port=port).group(ServerConfig)
        check_exposure(address)
        if port and (server.api_server_count or 1) == 1:
            open_socket(address).close()

    async def start(self) -> None:
        # grpc is imported by servers that use it.
        from modulm_route_grpc.server import GrpcServer

        host, port = address_of(self.context.config)
        self.server = GrpcServer(self.context, (host, port))
        await self.server.start()
        log.info("gRPC is served at %s:%d", host, self.server.port)

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop()
            self.server = None
