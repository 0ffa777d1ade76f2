"""Routes of pooling models: embeddings, scores, reranking, classification, raw vectors."""

from modulm_route_pooling.family import Pooling

__all__ = ["Pooling"]
