"""Fields of vLLM that are absent: none is ignored silently."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest

from modulm_route_adapters.family import LoadRequest
from modulm_route_anthropic.schema import MessagesRequest
from modulm_route_openai.schema import ChatRequest, CompletionRequest
from modulm_route_pooling.schema import EmbedRequest
from modulm_route_responses.schema import ResponsesRequest
from modulm_server.absent_fields import absent_of
from modulm_server.errors import ApiError
from modulm_server.json_body import to_struct

SCHEMAS: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest, "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbedRequest,
    "/v1/load_lora_adapter": LoadRequest,
}  # fmt: skip
NEEDED: dict[Any, dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    MessagesRequest: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5},
}


def test_every_field_of_the_page_is_refused_or_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = Path(__file__).resolve().parents[2] / "tools/absent.toml"
    listed = tomllib.loads(path.read_text(encoding="utf-8"))["fields"]
    assert listed.keys() == SCHEMAS.keys()
    caplog.set_level(logging.INFO, logger="modulm_server")
    for route, reasons in listed.items():
        schema = SCHEMAS[route]
        for name in (name for names in reasons.values() for name in names):
            caplog.clear()
            body = {**NEEDED.get(schema, {}), name: "x"}
            if name in absent_of(schema).no_effect:
                to_struct(body, schema)
                assert f"{name} has no effect" in caplog.text
                continue
            with pytest.raises(ApiError, match="Not supported yet") as caught:
                to_struct(body, schema)
            assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize("schema", [CompletionRequest, ResponsesRequest, MessagesRequest])
def test_other_requests_refuse_them_too(schema: Any) -> None:
    for value in (None, False, "", {}):
        to_struct({**NEEDED.get(schema, {}), "watermarking": value}, schema)
    with pytest.raises(ApiError, match="watermarking"):
        to_struct({**NEEDED.get(schema, {}), "watermarking": True}, schema)
