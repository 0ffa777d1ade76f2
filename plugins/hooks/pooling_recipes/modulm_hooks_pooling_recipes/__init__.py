"""Pooling as checkpoints of sentence-transformers and of rerankers say it, for modulm."""
