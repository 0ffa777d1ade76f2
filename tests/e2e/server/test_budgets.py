"""Thinking budgets over HTTP, with a model that would think on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from modulm import AsyncLLM
from modulm.config import EngineConfig
from modulm_server.testing import Live, serve_in_thread

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n{{ '</think>' if enable_thinking is false }}"
)
BUDGET = 6


@pytest.fixture(scope="module")
def live(tiny_folder: Path) -> Iterator[Live]:
    config = EngineConfig.from_keywords(
        model=str(tiny_folder), served_model_name=("M",), dtype="float32", cpu_threads=1,
        max_model_len=256, kv_cache_memory_bytes=1 << 24, disable_frontend_multiprocessing=True,
        disable_uvicorn_access_log=True, reasoning_parser="qwen3", chat_template=TEMPLATE,
    )  # fmt: skip
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as server:
            yield server
    finally:
        engine.shutdown()


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as openai_client:
        yield openai_client


def asked(budget: int | None, **fields: Any) -> dict[str, Any]:
    extra = {"ignore_eos": True, **fields.pop("extra", {})}
    if budget is not None:
        extra["thinking_token_budget"] = budget
    messages = [{"role": "user", "content": "Well?"}]
    request = {"model": "M", "messages": messages, "temperature": 0, "max_tokens": 20}
    return {**request, **fields, "extra_body": extra}


def test_chat_whole_and_streamed(client: openai.OpenAI, live: Live) -> None:
    close = live.engine.tokenizer.added_tokens["</think>"]
    free = client.chat.completions.create(**asked(None)).choices[0].message.model_dump()
    whole = client.chat.completions.create(**asked(BUDGET, n=2, extra={"return_token_ids": True}))
    parts: dict[int, dict[str, str]] = {0: {}, 1: {}}
    stream = client.chat.completions.create(**asked(BUDGET, n=2, stream=True))
    for chunk in stream:
        for choice in chunk.choices:
            part = parts[choice.index]
            for name, text in choice.delta.model_dump().items():
                if name in ("reasoning", "content"):
                    part[name] = part.get(name, "") + (text or "")
    for one in whole.choices:
        message = one.message.model_dump()
        assert message["reasoning"]
        assert free["reasoning"].startswith(message["reasoning"])
        assert one.model_dump()["token_ids"].index(close) == BUDGET
        assert message["content"]
        assert parts[one.index] == {name: message[name] for name in ("reasoning", "content")}
    assert whole.usage is not None
    details = whole.usage.completion_tokens_details
    assert details is not None
    assert 0 < (details.reasoning_tokens or 0) < whole.usage.completion_tokens
    nothing = client.chat.completions.create(**asked(0)).choices[0].message.model_dump()
    assert nothing["reasoning"] is None
    assert nothing["content"]


def test_an_answer_in_json_behind_it(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    extra = {"ignore_eos": False, "structured_outputs": None}
    answer = client.chat.completions.create(
        **asked(BUDGET, response_format=form, extra=extra, max_tokens=60)
    )
    message = answer.choices[0].message.model_dump()
    assert message["reasoning"]
    assert json.loads(message["content"])["a"] in (1, 2)


def test_items_and_blocks(client: openai.OpenAI, live: Live) -> None:
    bounded = client.chat.completions.create(**asked(BUDGET, extra={"ignore_eos": False}))
    expected = bounded.choices[0].message.model_dump()["reasoning"]
    item: Any = client.responses.create(
        model="M", input="Well?", temperature=0, max_output_tokens=20,
        extra_body={"thinking_token_budget": BUDGET},
    ).output[0]  # fmt: skip
    assert item.content[0].text == expected
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as other:
        block: Any = other.messages.create(
            model="M", max_tokens=20, extra_body={"temperature": 0},
            messages=[{"role": "user", "content": "Well?"}],
            thinking={"type": "enabled", "budget_tokens": BUDGET},
        ).content[0]  # fmt: skip
    assert block.thinking == expected


def test_effort_that_is_none_leaves_no_thought(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**asked(None, reasoning_effort="none"))
    message = answer.choices[0].message.model_dump()
    assert message["reasoning"] is None
    assert message["content"]
