"""No content of a request becomes a 500 (reference cases A040 to A122): a real model and server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from samples import parametrize_sample

from modulm import AsyncLLM
from modulm.config import EngineConfig
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty
from modulm_server.testing import Live, error_of, serve_in_thread

CHAT = "/v1/chat/completions"
#: Rows of the engine.
ROWS = 64
#: What no text can satisfy, and what refers to itself: all of it was a 500.
NO_TEXT: dict[str, dict[str, Any]] = {
    "left recursion": {"structured_outputs": {"grammar": "root ::= root"}},
    "empty class": {"structured_outputs": {"regex": r"[^\s\S]"}},
    "itself": {"structured_outputs": {"json": {"$ref": "#"}}},
    "each other": {"structured_outputs": {"json": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}},
    "itself, twice": {"structured_outputs": {"json": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}},
    "itself, in a tag": {"structured_outputs": {"structural_tag": {
        "type": "structural_tag",
        "format": {"type": "json_schema", "json_schema": {"$ref": "#"}}}}},
    "huge bound": {"structured_outputs": {"json": {"type": "integer", "minimum": 10**30}}},
    "huge constant": {"structured_outputs": {"json": {"enum": [1e308, 10**40]}}},
    "huge bound, as text": {"structured_outputs": {
        "json": f'{{"type": "integer", "minimum": {10**30}}}'}},
    "huge argument": {"vllm_xargs": {"a": 10**400}},
    "huge bound of a tool": {"tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"type": "object", "properties": {
            "a": {"type": "integer", "maximum": 2**70}}}}}], "tool_choice": "required"},
}  # fmt: skip
#: Numbers at the edge of what is allowed: answers, not errors.
EXTREME: dict[str, dict[str, Any]] = {
    "least repetition penalty": {"repetition_penalty": 5e-324},
    "small repetition penalty": {"repetition_penalty": 1e-300, "temperature": 1},
    "all penalties": {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 100,
                      "temperature": 2},
    "least temperature": {"temperature": 5e-324, "top_p": 5e-324},
    "all tokens but one disliked": {"logit_bias": {"7": 100, "8": -100}, "top_k": 2**31},
    "largest seed": {"seed": 2**63 - 1, "n": 3, "temperature": 1},
    "bounds of 64 bits": {"structured_outputs": {
        "json": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}}},
    "longest list": {"structured_outputs": {
        "json": {"type": "array", "items": {"type": "null"}, "maxItems": 2**62}}},
    "recursive": {"structured_outputs": {"json": {
        "type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}}},
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    """A checkpoint whose generation_config.json names end tokens that its model does not have."""
    folder = make_tiny(tmp_path_factory.mktemp("content") / "tiny")
    file = Path(folder) / "generation_config.json"
    table = json.loads(file.read_text()) if file.is_file() else {}
    ends = table.get("eos_token_id", [])
    table["eos_token_id"] = [*(ends if isinstance(ends, list) else [ends]), 10**6]
    file.write_text(json.dumps({**table, "min_tokens": 3, "min_new_tokens": 3}))
    llm = AsyncLLM(
        model=str(folder),
        dtype="float32",
        cpu_threads=1,
        kv_cache_memory_bytes=1 << 24,
        disable_frontend_multiprocessing=True,
        max_model_len=256,
        max_num_seqs=ROWS,
        # The process that compiles has a low priority, and much to wait for on a busy machine.
        structured_outputs_config={"compile_timeout": 300},
    )
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def live(engine: AsyncLLM) -> Iterator[Live]:
    config = EngineConfig.from_keywords(model="M", disable_uvicorn_access_log=True)
    with serve_in_thread(engine, config) as server:
        yield server


@pytest.fixture
def http(live: Live) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client
    check_empty(live.engine._core.core.loop)


def ask(http: httpx.Client, **fields: Any) -> httpx.Response:
    body = {"model": "M", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
    return http.post(CHAT, json={**body, **fields})


@pytest.mark.parametrize("fields", NO_TEXT.values(), ids=NO_TEXT)
def test_what_cannot_be_is_refused(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = ask(http, **fields)
    assert response.status_code == 400
    assert error_of(response)["param"] in fields


@pytest.mark.parametrize("fields", EXTREME.values(), ids=EXTREME)
def test_extreme_numbers_are_numbers(http: httpx.Client, fields: dict[str, Any]) -> None:
    response = ask(http, **fields)
    assert response.status_code == 200, response.text


def test_more_choices_than_the_engine_has_rows(http: httpx.Client) -> None:
    """64 prompts with 16 choices each wait for rows; beyond --max-request-sequences none runs."""
    body = {"model": "M", "prompt": [[5, 6 + i] for i in range(64)], "max_tokens": 1,
            "min_tokens": 0, "n": 16, "ignore_eos": True}  # fmt: skip
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(1024))
    assert answer.json()["usage"]["completion_tokens"] == 1024
    refused = http.post("/v1/completions", json={**body, "n": 33})
    assert refused.status_code == 400
    error = error_of(refused)
    assert error["param"] == "n"
    assert "2112 sequences; the limit is 2048 (--max-request-sequences)" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_all_tokens_banned(http: httpx.Client, engine: AsyncLLM, stream: bool) -> None:
    end = engine.tokenizer.stop_ids[0]
    word = engine.tokenizer.encode("a", add_special_tokens=False)
    for banned in (
        {"allowed_token_ids": [end], "min_tokens": 2},
        {"allowed_token_ids": word, "bad_words": ["a"]},
        {"allowed_token_ids": word, "structured_outputs": {"choice": ["bc"]}},
    ):
        response = ask(http, **banned, stream=stream)
        assert response.status_code == 400
        assert "no token can be sampled" in error_of(response)["message"]


def test_a_minimum_where_end_tokens_do_not_exist(http: httpx.Client, engine: AsyncLLM) -> None:
    assert 10**6 not in engine._input_processor.eos
    response = ask(http, min_tokens=5, temperature=0)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] >= 5


@pytest.mark.exhaustive
def test_a_large_schema(http: httpx.Client) -> None:
    names = [f"property_number_{index}" for index in range(1800)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "description": "x" * 40} for name in names},
        "required": names,
    }
    assert len(json.dumps(schema)) > 150_000
    assert ask(http, structured_outputs={"json": schema}).status_code == 200


@parametrize_sample(
    ("number", "message"),
    [("NaN", "finite"), ("-Infinity", "finite"), ("1e999", "finite"), ("9" * 5000, "out of range")],
    every=4,
)
def test_numbers_that_json_has_not(http: httpx.Client, number: str, message: str) -> None:
    for field in ('"temperature": %s', '"tools": [{"x": %s}]', '"logit_bias": {"5": %s}'):
        body = '{"model": "M", "messages": [{"role": "user", "content": "hi"}], ' + field + "}"
        response = http.post(
            CHAT, content=body % number, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 400
        assert message in error_of(response)["message"]
