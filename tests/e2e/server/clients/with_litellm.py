"""LiteLLM: a chat, a stream, a tool call, through hosted_vllm and openai."""

import sys

import litellm

URL = f"{sys.argv[1]}/v1"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
for provider in ("hosted_vllm", "openai"):
    options = {"model": f"{provider}/demo", "api_base": URL, "api_key": "none", "temperature": 0}
    answer = litellm.completion(**options, messages=QUESTION)
    assert "Paris" in answer.choices[0].message.content
    parts = litellm.completion(**options, messages=QUESTION, stream=True)
    assert "Paris" in "".join(part.choices[0].delta.content or "" for part in parts)
