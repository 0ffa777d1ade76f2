"""Bodies that are nearly right, to every route of a real engine: none of them is our fault.

Each is a good request in which some fields hold other values: plausible ones that meet for the
first time, or anything at all. The server never answers 5xx and never ends a stream with an
error of its own, and afterwards the engine still says what it said before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import Live, serve_in_thread

TEXTS = (
    "", "a", "\x00", "😀😀", "</s>", "<|im_end|>", "\ud800", "x" * 3000, "{{7*7}}", "{% for %}",
    "%s%n", "../../etc/passwd", "null", "M", "auto", "required", "none", "json_object", "user",
    "tool", "text", "image_url", "function", "-1", "1e999", "ⅷ", "\u202e", "[DONE]", "a\nb", "[",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, -0.0, 0.5, 1e-300, 1e308, -1e308, 3.4e38, 1e39, 2**31 - 1, 2**31, -(2**31), 2**32,
    2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**64), 2**70, 10**40, 100_000, True, False,
)  # fmt: skip
KEYS = (*TEXTS, "type", "content", "text", "role", "name", "schema", "properties", "id", "items")
SCHEMAS: tuple[Any, ...] = (
    {}, True, False, {"type": "string"}, {"type": ["string", "null"]}, {"$ref": "#"},
    {"$ref": "#/x"}, {"type": "array", "items": {"$ref": "#"}}, {"enum": []}, {"anyOf": []},
    {"enum": [None, 1, "a", {"a": 1}]}, {"const": {"a": [1]}}, {"type": "string", "pattern": "("},
    {"type": "string", "format": "date-time"}, {"type": "string", "format": "nope"}, {"not": {}},
    {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"oneOf": [{}]}, {"type": "no"},
    {"type": "object", "properties": {"": {"type": "null"}}, "required": [""]},
    {"type": "object", "patternProperties": {"^a": {}}}, {"type": "integer", "multipleOf": 7},
    {"type": "array", "minItems": 5, "maxItems": 1}, {"type": "number", "multipleOf": 0},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": False}, {"if": {}, "then": {}},
    {"type": "string", "minLength": 5, "maxLength": 1}, {"type": "number", "maximum": -1e308},
    {"type": "object", "minProperties": 10, "additionalProperties": False},
    {"type": "integer", "minimum": 5, "maximum": 1}, {"type": "integer", "minimum": 10**30},
    {"type": "object", "required": ["a"] * 100}, {"type": "object", "properties": {"a": 1}},
)  # fmt: skip
REGEXES = ("a{1,3}", "(a|b)*", "(", "(?=a)b", "(((a*)*)*)*", "\\p{L}+", "^$", "", "a{0}", "\\ud800")
GRAMMARS = ("root ::= root", 'root ::= "a"', 'start: "a"', "root ::= [a-")
#: Values of fields that are not odd by themselves.
PLAUSIBLE: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.1, 2, 1e-9), "top_p": (1, 0.1, 1e-9), "top_k": (0, -1, 1, 512, 1000),
    "min_p": (0, 1, 0.5), "n": (1, 2, 5), "seed": (0, -1, 2**63 - 1, 2**63),
    "presence_penalty": (-2, 2, 0), "frequency_penalty": (-2, 2), "min_tokens": (0, 1, 3, 300),
    "repetition_penalty": (1.5, 0.5), "stop_token_ids": ([0], [1, 2], [511], list(range(512))),
    "allowed_token_ids": ([9], [300], list(range(512))), "bad_words": (["a"], ["</s>"], [" "]),
    "logit_bias": ({"1": 100}, {"1": -100}, {"511": 1e-300}, {str(i): -100 for i in range(300)}),
    "logprobs": (0, 1, 5, 20, True), "prompt_logprobs": (0, 1, 20, -1), "top_logprobs": (0, 20, 2),
    "ignore_eos": (True,), "stream": (True, False), "echo": (True,), "use_beam_search": (True,),
    "truncate_prompt_tokens": (-1, 0, 1, 2, 1000), "length_penalty": (0, -5, 5, 1e9),
    "stop": ("", "a", ["a", "b"], ["\n"] * 4), "max_tokens": (0, 1, 5, None), "suffix": ("x",),
    "include_stop_str_in_output": (True,), "skip_special_tokens": (False,), "user": ("u",),
    "priority": (1, -1, 2**40), "guided_regex": REGEXES, "guided_grammar": GRAMMARS,
    "guided_choice": (["a"], [], ["a", "a"], ["", ""], [""]), "guided_json": SCHEMAS,
    "stream_options": ({"include_usage": True}, {"continuous_usage_stats": True}, {}),
    "response_format": (
        {"type": "json_object"}, {"type": "text"},
        *({"type": "json_schema", "json_schema": {"name": "x", "schema": s}} for s in SCHEMAS),
    ),
    "structured_outputs": (
        *({"json": s} for s in SCHEMAS), *({"regex": r} for r in REGEXES), {"choice": ["x"]},
        *({"grammar": g} for g in GRAMMARS), {"json_object": True}, {"structural_tag": "{}"},
        {"json": {"type": "string"}, "whitespace_pattern": "("},
    ),
    "tool_choice": ("required", "none", "auto", {"type": "function", "function": {"name": "f"}}),
    "parallel_tool_calls": (False,), "add_generation_prompt": (False,), "max_output_tokens": (17,),
    "continue_final_message": (True,), "documents": ([{"title": "a", "text": "b"}],),
    "chat_template_kwargs": ({"a": 1}, {"messages": 1}, {"self": 1}, {"tokenize": True}),
    "prompt": ([1], [[1], [2]], ["a", "b"], "", [], [[]], [""], [1] * 260, "a" * 300),
    "messages": (
        [], [{"role": "user", "content": ""}], [{"role": "assistant", "content": "x"}],
        [{"role": "user", "content": "hi", "name": "n"}], [{"role": "user", "content": []}],
        [{"role": "user"}], [{"role": "odd", "content": "hi"}],
    ),
    "input": (
        "", [], "a" * 300, [{"type": "function_call_output", "call_id": "x", "output": "y"}],
        [{"type": "reasoning", "summary": []}], [{"type": "item_reference", "id": "x"}],
    ),
    "thinking": ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}),
    "text": ({"format": {"type": "json_object"}}, {"verbosity": "low"}), "background": (True,),
    "tokens": ([0], [511], [512], [-1], [2**40], []), "cache_salt": ("a",), "store": (True,),
}  # fmt: skip
TOOL = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": TOOL}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "r"},
    {"role": "user", "content": "hi"},
]
NUMBER = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 9}}}
TEXT = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "M", "messages": MESSAGES, "max_tokens": 3, "temperature": 1.0, "seed": 1,
        "stop": ["x"], "logit_bias": {"5": 1}, "tools": TOOLS, "tool_choice": "auto",
        "response_format": {"type": "text"}, "logprobs": True, "top_logprobs": 2,
    },
    "/v1/completions": {
        "model": "M", "prompt": "a", "max_tokens": 3, "n": 1, "stop_token_ids": [5],
        "structured_outputs": {"json": NUMBER}, "stream": True,
    },
    "/v1/responses": {
        "model": "M", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "max_output_tokens": 16, "tools": [{"type": "function", "name": "f", "parameters": TOOL}],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": NUMBER}}, "store": False,
    },
    "/v1/messages": {
        "model": "M", "max_tokens": 3, "messages": TEXT, "system": "s", "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": TOOL}], "thinking": {"type": "disabled"},
    },
    "/v1/messages/count_tokens": {"model": "M", "messages": TEXT, "tool_choice": {"type": "auto"}},
    "/v1/responses/input_tokens": {"model": "M", "input": "hi"},
    "/tokenize": {"model": "M", "messages": MESSAGES, "tools": TOOLS},
    "/detokenize": {"model": "M", "tokens": [1, 2]},
    "/v1/batches": {
        "input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h",
        "metadata": {"a": "b"},
    },
    "/v1/embeddings": {"model": "M", "input": ["a"], "dimensions": 2},
    "/score": {"model": "M", "text_1": "a", "text_2": ["b"]},
    "/rerank": {"model": "M", "query": "a", "documents": ["b"], "top_n": 1},
    "/classify": {"model": "M", "input": "a"},
    "/pooling": {"model": "M", "input": "a"},
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls }}"
    "{% endif %}{% endfor %}"
)


def anything(rng: random.Random, depth: int = 0) -> Any:
    """A JSON value without a thought."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(NUMBERS)
    if kind < 0.6:
        return rng.choice(TEXTS)
    if kind < 0.7:
        return None
    count = 0 if depth > 2 else rng.choice((0, 1, 2, 5))
    if kind < 0.85:
        return [anything(rng, depth + 1) for _ in range(count)]
    return {rng.choice(KEYS): anything(rng, depth + 1) for _ in range(count)}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is in a value."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another thing in a place."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


def bodies(rng: random.Random, good: Mapping[str, Any], fields: list[str]) -> Iterator[Any]:
    """One body after the other."""
    known = [name for name in fields if name in PLAUSIBLE] or fields
    while True:
        body = dict(good)
        if rng.random() < 0.6:
            for _ in range(rng.choice((1, 2, 2, 3, 4))):
                name = rng.choice(known)
                body[name] = rng.choice(PLAUSIBLE.get(name, (None,)))
        if rng.random() < 0.6:
            for _ in range(rng.choice((1, 1, 2))):
                if rng.random() < 0.5:
                    body[rng.choice(fields)] = anything(rng)
                elif paths := list(places(body)):
                    body = changed(body, rng.choice(paths), anything(rng))
        yield body


@pytest.fixture(scope="module")
def engine_and_server(tiny_folder: Path) -> Iterator[Live]:
    config = EngineConfig.from_keywords(
        model=str(tiny_folder), served_model_name=("M",), dtype="float32", cpu_threads=1,
        max_model_len=256, kv_cache_memory_bytes=1 << 24, disable_frontend_multiprocessing=True,
        disable_uvicorn_access_log=True, enable_auto_tool_choice=True, tool_call_parser="hermes",
        reasoning_parser="qwen3", chat_template=TEMPLATE,
    )  # fmt: skip
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as live:
            yield live
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def fields(engine_and_server: Live) -> dict[str, list[str]]:
    """Names of the fields of each route's body, as the server describes itself."""
    with engine_and_server.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    names_by_path = {}
    for path in GOOD:
        content = paths[path]["post"]["requestBody"]["content"]
        schema = content["application/json"]["schema"]
        names_by_path[path] = sorted(schema["properties"])
    return names_by_path


def wrong(answer: httpx.Response) -> bool:
    """Whether the server has blamed itself."""
    body = answer.text
    return answer.status_code >= 500 or '"server_error"' in body or '"api_error"' in body


@parametrize_sample("path", GOOD, every=4)
def test_no_content_is_the_servers_fault(
    engine_and_server: Live,
    fields: dict[str, list[str]],
    path: str,
    rng: random.Random,
    rounds: int,
) -> None:
    plain = {"model": "M", "prompt": "a b c", "max_tokens": 6, "temperature": 0}
    rng.seed(f"{rng.random()} {path}")
    statuses = set()
    with engine_and_server.client(headers={"content-type": "application/json"}) as client:
        before = client.post("/v1/completions", json=plain).json()["choices"]
        source = bodies(rng, GOOD[path], fields[path])
        for _, body in zip(range(40 * rounds), source, strict=False):
            answer = client.post(path, content=json.dumps(body).encode(), timeout=300)
            assert not wrong(answer), f"{json.dumps(body)}\n{answer.text}"
            statuses.add(answer.status_code)
        assert client.post("/v1/completions", json=plain).json()["choices"] == before
    assert 400 in statuses
