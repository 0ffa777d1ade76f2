"""Cohere's clients: embeddings and reranking with an embedding model, and chats."""

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

chat = cohere.ClientV2(api_key="none", base_url=sys.argv[1])
question = "What is the capital of France?"
asked = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0}
answer = chat.chat(**asked, max_tokens=16)
assert "Paris" in answer.message.content[0].text
assert answer.usage.tokens.output_tokens > 0
events = list(chat.chat_stream(**asked, max_tokens=16))
assert events[-1].type == "message-end"
streamed = [event.delta.message.content.text for event in events if event.type == "content-delta"]
assert "".join(streamed) == answer.message.content[0].text

older = cohere.Client(api_key="none", base_url=sys.argv[1])
settings = {"model": "demo", "message": question, "temperature": 0, "max_tokens": 16}
assert "Paris" in older.chat(**settings).text
lines = list(older.chat_stream(**settings))
assert lines[-1].event_type == "stream-end"
assert "".join(line.text for line in lines if line.event_type == "text-generation").count("Paris")
