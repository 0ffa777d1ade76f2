"""Pooling settings from the files of sentence-transformers models and rerankers."""
