"""Ollama's client: list, show, chat, generate."""

import sys

import ollama

client = ollama.Client(host=sys.argv[1])
assert [model.model.partition(":")[0] for model in client.list().models] == ["demo"]
assert client.show("demo").modelinfo
question = [{"role": "user", "content": "What is the capital of France?"}]
answer = client.chat("demo", question, options={"temperature": 0})
assert "Paris" in answer.message.content
parts = client.chat("demo", question, options={"temperature": 0}, stream=True)
assert "Paris" in "".join(part.message.content for part in parts)
assert client.generate("demo", "Hello", options={"num_predict": 4}).response
