"""The banner's line on gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modulm.plugins import hookimpl
from modulm_route_grpc.flags import GrpcConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["modulm_report_header"]


@hookimpl
def modulm_report_header(config: EngineConfig | None) -> Sequence[str]:
    """Return the banner's line on gRPC."""
    if config is None or not config.group(GrpcConfig).on:
        return ()
    from modulm_route_grpc.family import address_of

    host, port = address_of(config)
    return (f"gRPC: {host}:{port or 'a free port, which the log shows'}",)
