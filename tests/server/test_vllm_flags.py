"""Flags of vLLM's server that change which requests are taken, and what they ask the engine for."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from modulm.contracts.media import MediaItem
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import ConfigError
from modulm_media import MediaPrompt
from modulm_route_anthropic.schema import MessagesRequest, variables_of
from modulm_server.chat_turn import Parsers
from modulm_server.forced_calls import force_calls
from modulm_server.generation import GenerationService
from modulm_server.testing import Live

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


def test_tokens_only(make_server: Callable[..., Live]) -> None:
    live = make_server(tokens_only=True)
    with live.client() as http:
        body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
        answer = http.post("/inference/v1/generate", json=body).json()
        assert len(answer["choices"][0]["token_ids"]) == 2
        for path, status in (
            ("/v1/models", 200), ("/health", 200), ("/metrics", 200),
            ("/", 404), ("/v1/chat/completions", 404), ("/tokenize", 404), ("/api/tags", 404),
        ):  # fmt: skip
            assert http.get(path).status_code == status, path


def test_levels_of_strictness(tokenizer: Tokenizer) -> None:
    def tag(level: str, tool: dict[str, Any] = TOOL) -> str | None:
        forced = force_calls("auto", [tool], Parsers("hermes", None, level), tokenizer)
        assert forced.in_model_format == (forced.constraint is not None)
        return None if forced.constraint is None else str(forced.constraint.structural_tag)

    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    assert tag("auto") is None
    assert tag("parameter") == tag("auto", strict) == tag("function", strict)
    envelope = tag("function")
    assert envelope is not None
    assert "get_weather" in envelope
    assert "city" not in envelope
    json.loads(envelope)


def test_efforts_of_disabled_thinking() -> None:
    body = MessagesRequest(
        model="M", max_tokens=5, messages=[{"role": "user", "content": "a"}],
        thinking={"type": "disabled"},
    )  # fmt: skip
    assert variables_of(body, "qwen3")["enable_thinking"] is False
    assert variables_of(body, "qwen3", "none") == variables_of(body, "qwen3")
    low = variables_of(body, "qwen3", "low")
    assert low["reasoning_effort"] == "low"
    assert low.get("enable_thinking") is not False
    assert variables_of(body, "openai_gptoss")["reasoning_effort"] == "low"


def test_adapters_by_media(make_server: Callable[..., Live]) -> None:
    service = SimpleNamespace(media_adapters={"image": "image", "audio": "audio"})

    def chosen(*kinds: str) -> str | None:
        items = tuple(MediaItem(kind, b"", 0, 1) for kind in kinds)
        media = MediaPrompt(np.zeros(1, dtype=np.int64), items)
        return GenerationService._adapter_of(service, media)  # type: ignore[arg-type]

    assert (chosen("image", "image"), chosen("video"), chosen("video", "audio")) == (
        "image", None, "audio",
    )  # fmt: skip
    assert chosen("image", "audio") is None
    for value, words in (({"image": "/a"}, "needs --enable-lora"), ({"smell": "/a"}, "smell")):
        with pytest.raises(ConfigError, match=words):
            make_server(default_mm_loras=value)
