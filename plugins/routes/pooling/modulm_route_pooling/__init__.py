"""What pooling models give: embeddings, scores, ranks, classes, and their raw vectors."""

from modulm_route_pooling.family import Pooling

__all__ = ["Pooling"]
