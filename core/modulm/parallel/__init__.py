"""Parallelism: groups of ranks and their collectives."""

from modulm.parallel.mesh import Mesh, ProcessGroup

__all__ = ["Mesh", "ProcessGroup"]
