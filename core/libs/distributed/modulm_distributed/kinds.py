"""The driver kind that this package adds: collectives."""

from modulm.plugins.kinds import Kind

__all__ = ["COLLECTIVES"]

COLLECTIVES = Kind(
    "collectives",
    "collectives",
    "collectives",
    "modulm_distributed.collectives:Collectives",
    kit="modulm_distributed.collectives_kit:check_collectives",
)
