"""Cohere's client: embeddings and reranking, with an embedding model."""

import sys

import cohere

client = cohere.ClientV2(api_key="none", base_url=sys.argv[2])
embedded = client.embed(
    model="embed", texts=["a text", "another"], input_type="search_document",
    embedding_types=["float"],
)  # fmt: skip
assert len(embedded.embeddings.float_) == 2
ranked = client.rerank(model="embed", query="a text", documents=["another", "a text"], top_n=1)
assert len(ranked.results) == 1
