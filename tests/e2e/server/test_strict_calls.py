"""Calls of a model that knows nothing, held to its parser's format: the openai SDK gets valid ones.

One engine process with random weights stands behind a server for each family.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm.testing.checkpoints import make_tiny
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import serve_in_thread

#: JSON in tags, behind headers, bare and in lists; elements, pairs, Python, tokens, channels.
FAMILIES = (
    "hermes", "mistral", "llama3_json", "deepseek_v31", "granite", "qwen3_coder", "glm45",
    "pythonic", "gemma4", "openai",
)  # fmt: skip
PLACE = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Bern"]},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "range": {
            "type": "object",
            "properties": {"from": {"enum": [1, 2]}, "unit": {"enum": ["day", None]}},
            "required": ["from"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": PLACE, "now": EMPTY}
ASKED: Any = [{"role": "user", "content": "What is the weather?"}]


def tool(name: str, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], **more}}


TOOLS = [tool("get_weather"), tool("now")]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED: Any = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "required", "tools": [NAMED]},
}
#: What a request asks for -> the names that it may call, and whether one call is all.
WAYS: tuple[tuple[dict[str, Any], set[str], bool], ...] = (
    ({"tool_choice": "required"}, {"get_weather", "now"}, False),
    ({"tool_choice": "required", "parallel_tool_calls": False}, {"get_weather", "now"}, True),
    ({"tool_choice": NAMED}, {"get_weather"}, True),
    ({"tool_choice": ALLOWED, "parallel_tool_calls": False}, {"get_weather"}, True),
    ({"tool_choice": ALLOWED}, {"get_weather"}, False),
)


@pytest.fixture(scope="module")
def url_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The server of a family, started when it is first needed; all have one engine."""
    folder = make_tiny(tmp_path_factory.mktemp("strict") / "tiny", max_position_embeddings=2048)
    flags: dict[str, Any] = {
        "model": str(folder),
        "max_model_len": 2048,
        "max_num_seqs": 32,
        "enable_auto_tool_choice": True,
        "served_model_name": ["M"],
        "disable_uvicorn_access_log": True,
    }
    engine = AsyncLLM.from_config(EngineConfig.from_keywords(**flags))
    with ExitStack() as stack:
        stack.callback(engine.shutdown)

        @cache
        def start(name: str) -> str:
            front = AsyncLLM.connect(engine.address)
            stack.callback(front.shutdown)
            config = EngineConfig.from_keywords(**flags, tool_call_parser=name)
            return stack.enter_context(serve_in_thread(front, config)).url

        yield start


def calls_of(client: openai.OpenAI, stream: bool, given: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, arguments) of the calls of an answer that has nothing else.

    A model that wants to call for ever is cut off: the call that was cut does not count.
    """
    # The end of the sequence is taken as soon as the grammar allows it.
    options: Any = {
        "model": "M", "messages": ASKED, "tools": TOOLS, "temperature": 1.0, "max_tokens": 1000,
        "logit_bias": {"2": 100}, **given,
    }  # fmt: skip
    if not stream:
        (choice,) = client.chat.completions.create(**options).choices
        assert choice.message.content is None
        functions: list[Any] = [call.function for call in choice.message.tool_calls or ()]
        return whole([(f.name, f.arguments) for f in functions], choice.finish_reason)
    calls: dict[int, list[str]] = {}
    reason = None
    for chunk in client.chat.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        assert not choice.delta.content
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            name, arguments = calls.setdefault(call.index, ["", ""])
            calls[call.index] = [
                name + (call.function.name or ""), arguments + (call.function.arguments or ""),
            ]  # fmt: skip
    return whole([(name, arguments) for name, arguments in calls.values()], reason)


def whole(calls: list[tuple[str, str]], reason: str | None) -> list[tuple[str, str]]:
    assert reason in ("tool_calls", "stop") or (reason == "length" and len(calls) > 1)
    return calls[:-1] if reason == "length" else calls


def check(calls: list[tuple[str, str]], names: set[str], single: bool) -> None:
    assert len(calls) == 1 if single else 1 <= len(calls) <= 64
    for name, arguments in calls:
        assert name in names
        Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))


@parametrize_sample("name", FAMILIES, every=8)
def test_forced_calls_are_valid(url_of: Callable[[str], str], name: str) -> None:
    """Twenty requests, all at once: five ways of asking, whole and streamed, twice."""
    with openai.OpenAI(base_url=f"{url_of(name)}/v1", api_key="none", max_retries=0) as client:

        def ask(number: int) -> None:
            request, names, single = WAYS[number % len(WAYS)]
            stream = number // len(WAYS) % 2 == 1
            check(calls_of(client, stream, {**request, "seed": number}), names, single)

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(ask, range(20)))


@pytest.mark.exhaustive
@parametrize_sample("stream", [False, True], every=2)
def test_with_auto_only_allowed_tools_can_be_called(
    url_of: Callable[[str], str], stream: bool
) -> None:
    """The model, which begins a call as soon as it may, is held to it by the grammar: nothing that
    it says has to be left out.
    """
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    begin = {"510": 100}  # <tool_call>
    with openai.OpenAI(base_url=f"{url_of('hermes')}/v1", api_key="none", max_retries=0) as client:
        for seed in range(4):
            request = {"tool_choice": allowed, "logit_bias": begin, "seed": seed, "max_tokens": 400}
            check(calls_of(client, stream, request), {"get_weather"}, single=False)
