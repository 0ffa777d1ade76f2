"""The flags of the gRPC server."""

from __future__ import annotations

from modulm.contracts.flags import flag, flag_group
from modulm_server.flags import OtherProtocol

__all__ = ["GrpcConfig"]


@flag_group
class GrpcConfig(OtherProtocol):
    """vLLM's gRPC services."""

    title = "gRPC"
    server = True

    grpc: bool = flag(
        False, "Serve gRPC instead of HTTP on --port; HTTP keeps a Unix socket (--uds)."
    )
    grpc_port: int | None = flag(
        None, "Port of a gRPC server beside HTTP; 0: any free port.", least=0, most=65535
    )

    @property
    def takes_port(self) -> bool:
        return self.grpc

    @property
    def on(self) -> bool:
        """Whether gRPC is served."""
        return self.grpc or self.grpc_port is not None
