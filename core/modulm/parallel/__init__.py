"""Who computes which part of a layer: groups of ranks and what they exchange."""

from modulm.parallel.mesh import Group, Mesh

__all__ = ["Group", "Mesh"]
