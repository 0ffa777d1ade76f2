"""OpenAI's client: chat, streams, tools, responses, completions and models."""

import sys

import openai

URL = sys.argv[1]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
}}}  # fmt: skip
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none")
assert [model.id for model in client.models.list()] == ["demo"]
answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
assert "Paris" in answer.choices[0].message.content
chunks = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, stream=True)
assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
called = client.chat.completions.create(
    model="demo", messages=[{"role": "user", "content": "What is the weather in Paris?"}],
    tools=[TOOL], tool_choice="required", temperature=0,
)  # fmt: skip
assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
response = client.responses.create(model="demo", input=QUESTION[0]["content"], temperature=0)
assert "Paris" in response.output_text
assert client.completions.create(model="demo", prompt="Hello", max_tokens=4).choices[0].text
