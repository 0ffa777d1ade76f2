"""Prompt caching under the control of clients: the counts of the three APIs are true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from modulm.config.sources import keywords
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import Live, serve_in_thread

LONG = "A long story about a river, a mill and the people who lived there. " * 4
FIVE = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture(scope="module")
def real() -> Iterator[Live]:
    """The embedded model behind a real server."""
    config = keywords(
        model="demo",
        max_num_seqs=16,
        prefix_retention=0.9,
        prefix_retention_per_key=1.0,
        disable_frontend_multiprocessing=True,
    ).config
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as live:
            yield live
    finally:
        engine.shutdown()


def post(live: Live, path: str, body: dict[str, Any], status: int = 200) -> Any:
    answer = httpx.post(live.url + path, json=body, timeout=300)
    assert answer.status_code == status, answer.text
    return answer.json()


def message(name: str, control: Any = None, **fields: Any) -> dict[str, Any]:
    system: dict[str, Any] = {"type": "text", "text": f"{name}. {LONG}"}
    talk: dict[str, Any] = {"type": "text", "text": f"{name} asks. {LONG}"}
    if control is not None:
        system["cache_control"] = control
        talk["cache_control"] = FIVE
    messages = [{"role": "user", "content": [talk]}]
    return {"model": "M", "max_tokens": 2, "system": [system], "messages": messages, **fields}


def usage(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    counts = post(live, "/v1/messages", {**body, "model": model(live)})["usage"]
    assert isinstance(counts, dict)
    return counts


def model(live: Live) -> str:
    return str(httpx.get(live.url + "/v1/models").json()["data"][0]["id"])


def test_cache_control(real: Live) -> None:
    plain = usage(real, message("Ann"))
    assert plain["cache_creation_input_tokens"] == 0
    total = plain["input_tokens"] + plain["cache_read_input_tokens"]
    first = usage(real, message("Bob", HOUR))
    created = first["cache_creation"]
    assert created["ephemeral_1h_input_tokens"] > 0
    assert created["ephemeral_5m_input_tokens"] > 0
    assert first["cache_creation_input_tokens"] == sum(created.values())
    counts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert abs(sum(first[name] for name in counts) - total) < 8
    again = usage(real, message("Bob", HOUR))
    assert again["cache_creation_input_tokens"] == 0
    assert again["cache_read_input_tokens"] > 0
    assert sum(again[name] for name in counts) == sum(first[name] for name in counts)


def test_marks_are_at_the_ends_of_blocks(real: Live) -> None:
    body = message("Eve", HOUR)
    del body["messages"][0]["content"][0]["cache_control"]
    counts = usage(real, body)
    # The system prompt is about half of the prompt; what follows is not held.
    assert 0 < counts["cache_creation_input_tokens"] < counts["input_tokens"]
    assert counts["cache_creation"]["ephemeral_5m_input_tokens"] == 0
    tools = [{"name": "look", "input_schema": {"type": "object"}, "cache_control": FIVE}]
    body = {**message("Joe"), "tools": tools, "tool_choice": {"type": "none"}}
    with_tools = usage(real, body)
    assert with_tools["cache_creation"]["ephemeral_5m_input_tokens"] > 0
    whole = usage(real, {**message("Zoe"), "cache_control": FIVE})
    assert whole["input_tokens"] < with_tools["input_tokens"]


@pytest.mark.parametrize(
    ("control", "words"),
    [
        ({"type": "lasting"}, "must be ephemeral"),
        ({"type": "ephemeral", "ttl": "2h"}, "5m or 1h"),
        ({"type": "ephemeral", "size": 1}, "no field 'size'"),
        ("5m", "must be ephemeral"),
    ],
)
def test_bad_cache_control_is_refused(control: Any, words: str, live: Live) -> None:
    body = message("Bad", control)
    assert words in post(live, "/v1/messages", body, 400)["error"]["message"]


def test_longer_times_come_first(live: Live) -> None:
    body = message("Bad", FIVE)
    body["messages"][0]["content"][0]["cache_control"] = HOUR
    assert "must come before" in post(live, "/v1/messages", body, 400)["error"]["message"]
    body = message("Bad", FIVE)
    body["messages"][0]["content"] *= 4
    assert "at most 4" in post(live, "/v1/messages", body, 400)["error"]["message"]


def test_routers_can_read_the_size_of_the_cache(real: Live) -> None:
    text = httpx.get(real.url + "/metrics").text
    labels = dict(re.findall(r'(\w+)="([^"]*)"', text.partition("modulm:cache_config_info{")[2]))
    assert int(labels["block_size"]) > 0
    assert int(labels["num_gpu_blocks"]) > 0


def test_openai_fields(real: Live) -> None:
    held = {"prompt_cache_key": "mill", "prompt_cache_retention": "24h"}
    body = {"messages": [{"role": "user", "content": f"Chat. {LONG}"}], "max_tokens": 2, **held}
    cached = []
    for _ in range(2):
        answer = post(real, "/v1/chat/completions", {**body, "model": model(real)})
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] < cached[1]
    body = {"input": f"Responses. {LONG}", "max_output_tokens": 2, "store": False, **held}
    written = []
    for _ in range(2):
        details = post(real, "/v1/responses", {**body, "model": model(real)})["usage"]
        written.append(details["input_tokens_details"]["cache_write_tokens"])
    assert written[0] > written[1]
    wrong = {**body, "model": model(real), "prompt_cache_retention": "forever"}
    assert "in_memory or 24h" in post(real, "/v1/responses", wrong, 400)["error"]["message"]
