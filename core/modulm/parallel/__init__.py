"""Who computes which part of a model: groups of ranks and what they exchange."""

from modulm.parallel.mesh import Mesh, ProcessGroup

__all__ = ["Mesh", "ProcessGroup"]
