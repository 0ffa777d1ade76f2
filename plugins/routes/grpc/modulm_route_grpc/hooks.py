"""Gives HTTP a Unix socket if gRPC takes its port."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modulm.plugins import Proposal, hookimpl
from modulm_route_grpc.flags import GrpcConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["modulm_config_proposals", "modulm_report_header"]


@hookimpl
def modulm_config_proposals(config: EngineConfig) -> Sequence[Proposal] | None:
    """Propose a Unix socket for HTTP with --grpc."""
    if not config.group(GrpcConfig).grpc:
        return None
    path = Path(tempfile.gettempdir()) / f"modulm-{os.getpid()}.sock"
    return (Proposal("uds", str(path), "--grpc serves gRPC on --port"),)


@hookimpl
def modulm_report_header(config: EngineConfig | None) -> Sequence[str]:
    """Return the banner's line on gRPC."""
    if config is None or not config.group(GrpcConfig).on:
        return ()
    from modulm_route_grpc.family import address_of

    host, port = address_of(config)
    return (f"gRPC: {host}:{port or 'a free port, which the log shows'}",)
