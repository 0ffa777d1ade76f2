"""Three backends that return the model's answer to a conversation.

`transformers` is the reference; `modulm` and `http` use this project's engine and server, with its
own parsers. Each imports its dependencies when created.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from .example import Message, Tool

Answer = Callable[..., Message]
MAX_TOKENS = 400
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def _decoded(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object; text that is not JSON stays as it is."""
    arguments = call.get("arguments")
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return {"name": call.get("name"), "arguments": arguments}
    return {"name": call.get("name"), "arguments": arguments}


def _split(text: str) -> Message:
    """Read a raw output strictly: thoughts, then content, then well-formed calls."""
    thought, _, rest = text.rpartition("</think>")
    calls = []
    for body in _CALL.findall(rest):
        try:
            calls.append(_decoded(json.loads(body)))
        except ValueError:
            calls.append({"name": None, "arguments": body})
    return {
        "reasoning_content": thought.removeprefix("<think>").strip(),
        "content": _CALL.sub("", rest).strip(),
        "tool_calls": calls,
    }


def transformers_backend(model: str) -> Answer:
    """Greedy decoding with transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def answer(messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> Message:
        prompt = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=True,
            return_tensors="pt", return_dict=True, **template,
        )  # fmt: skip
        with torch.inference_mode():
            output = network.generate(**prompt, do_sample=False, max_new_tokens=MAX_TOKENS)
        written = output[0, prompt["input_ids"].shape[1] :]
        return _split(tokenizer.decode(written, skip_special_tokens=True))

    return answer


def modulm_backend(model: str) -> Answer:
    """modulm's engine in this process, and its parsers."""
    from modulm import LLM, SamplingParams
    from modulm_parsing import parse

    engine = LLM(model=model)
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)

    def answer(messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> Message:
        request = {"tools": list(tools) or None, "chat_template_kwargs": template}
        output = engine.chat(list(messages), greedy, use_tqdm=False, **request)[0]
        message = parse(output.outputs[0].text, tool_parser="hermes", reasoning_parser="qwen3",
                        prompt=output.prompt, **request)  # fmt: skip
        calls = [{"name": c.name, "arguments": c.arguments} for c in message.tool_calls or ()]
        return {"content": message.content or "", "tool_calls": [_decoded(c) for c in calls]}

    return answer


def http_backend(model: str, url: str) -> Answer:
    """A running server with the hermes tool parser and the qwen3 reasoning parser."""
    import httpx

    client = httpx.Client(base_url=url, timeout=120)

    def answer(messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> Message:
        body = {
            "model": model, "messages": _wire(messages), "temperature": 0,
            "max_tokens": MAX_TOKENS, "chat_template_kwargs": template,
        }  # fmt: skip
        if tools:
            body["tools"] = list(tools)
        response = client.post("/v1/chat/completions", json=body).raise_for_status()
        message = response.json()["choices"][0]["message"]
        calls = [_decoded(call["function"]) for call in message.get("tool_calls") or ()]
        return {"content": message.get("content") or "", "tool_calls": calls}

    return answer


def _wire(messages: Sequence[Message]) -> list[Message]:
    """Add the ids and text arguments of the OpenAI API to calls."""
    sent: list[Message] = []
    open_ids: list[str] = []
    for message in messages:
        extra: Message = {}
        if calls := message.get("tool_calls"):
            open_ids = [f"call_{len(sent)}_{index}" for index in range(len(calls))]
            extra["tool_calls"] = [_wire_call(*pair) for pair in zip(open_ids, calls, strict=True)]
        elif message["role"] == "tool":
            extra["tool_call_id"] = open_ids.pop(0)
        sent.append({**message, **extra})
    return sent


def _wire_call(name: str, call: dict[str, Any]) -> dict[str, Any]:
    function = {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}
    return {"id": name, "type": "function", "function": function}
