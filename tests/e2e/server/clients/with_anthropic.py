"""Anthropic's client: messages, a stream, and the count of tokens."""

import sys

import anthropic

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none")
options = {"model": "demo", "messages": QUESTION, "max_tokens": 64}
message = client.messages.create(**options, extra_body={"temperature": 0})
assert "Paris" in message.content[0].text
with client.messages.stream(**options, extra_body={"temperature": 0}) as stream:
    assert "Paris" in "".join(stream.text_stream)
counted = client.messages.count_tokens(model="demo", messages=QUESTION)
assert counted.input_tokens == message.usage.input_tokens
