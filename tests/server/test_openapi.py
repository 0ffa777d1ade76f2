"""Every operation that the server describes, asked with what its own description allows."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, NotRequired, TypedDict, TypeVar

import httpx
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from samples import parametrize_sample
from schemathesis.specs.openapi import checks

from modulm_server.openapi import Shapes, response_docs
from modulm_server.testing import Live, error_of

#: What schemathesis holds answers to; those of this folder's servers are held to closed shapes too
#: (`as_described` of conftest.py), and each event of a stream is.
CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]

ServerMaker = Callable[..., Live]


def check(answer: Any, label: str) -> None:
    """Never our fault, and errors in the shape of the API that was asked. 501: what the model that
    is served cannot do.
    """
    assert answer.status_code < 500 or answer.status_code == 501, f"{label}: {answer.text}"
    if answer.status_code >= 400 and answer.text and "json" in answer.headers["content-type"][0]:
        if answer.json().get("type") == "error":
            assert label.startswith("POST /v1/messages"), f"{label}: {answer.text}"
        elif "message" in answer.json():
            assert label.partition("/v")[2] in ("1/chat", "2/chat", "2/chat/render"), label
        elif isinstance(answer.json().get("error"), str):
            assert " /api/" in label, f"{label}: {answer.text}"
        else:
            error_of(answer)


@parametrize_sample("every", [5, 1], every=2)
def test_what_the_description_allows_is_answered(
    make_server: ServerMaker, rounds: int, every: int
) -> None:
    live = make_server(
        info={
            "tasks": ("generate", "embed", "classify", "score"),
            "parts": {"adapters": {"slots": 2}},
        },
        enable_lora=True, allow_runtime_lora_updating=True,
    )  # fmt: skip
    logging.getLogger("schemathesis").setLevel(logging.ERROR)
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    statuses: Counter[str] = Counter()

    def asked_of(operation: Any) -> Callable[[], None]:
        @settings(
            max_examples=2 * rounds,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @hypothesis.given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            answer = case.call(timeout=300)
            check(answer, operation.label)
            case.validate_response(answer, checks=CHECKS)
            statuses[operation.label] += 1

        return ask

    for result in list(schema.get_all_operations())[::every]:
        asked_of(result.ok())()
    assert len(statuses) > 80 // every


def test_a_scripted_engine_says_what_is_allowed(live: Live) -> None:
    """Found by `make fuzz`, seed 2750565591: labels that the script did not say were a KeyError."""
    with live.client() as http:
        body = {"model": "M", "query": "a", "items": ["b"], "label_token_ids": [0, 7]}
        answer = http.post("/generative_scoring", json=body)
        assert answer.json()["data"][0]["score"] == 0.5


Kept = TypeVar("Kept")


class Leaf(TypedDict):
    """A leaf."""

    name: str


class Branch(TypedDict, Generic[Kept]):
    kept: list[Kept]
    note: NotRequired[str | None]
    kind: Literal["branch"]
    size: Annotated[int, "in leaves"]


class Loose(TypedDict, total=False):
    branches: dict[str, Branch[Leaf]]


def test_types_become_shapes() -> None:
    shapes = Shapes()
    assert shapes.schema_of(list[Loose | None]) == {
        "type": "array",
        "items": {"anyOf": [{"$ref": f"#/components/schemas/{HERE}.Loose"}, {"type": "null"}]},
    }
    loose, branch, leaf = (shapes.definitions[f"{HERE}.{name}"] for name in KNOWN)
    assert loose["required"] == []
    assert loose["properties"]["branches"]["additionalProperties"] == {
        "$ref": f"#/components/schemas/{HERE}.Branch.Leaf"
    }
    assert branch == {
        "type": "object",
        "properties": {
            "kept": {"type": "array", "items": {"$ref": f"#/components/schemas/{HERE}.Leaf"}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "kind": {"enum": ["branch"]},
            "size": {"type": "integer"},
        },
        "required": ["kept", "kind", "size"],
    }
    assert leaf["description"] == "A leaf."
    with pytest.raises(TypeError, match="has no JSON schema"):
        shapes.schema_of(set[int])


HERE = __name__.partition(".")[0]
KNOWN = ("Loose", "Branch.Leaf", "Leaf")


def test_every_operation_says_what_it_gives(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            assert set(responses) == {"200", "4XX", "5XX"}, (path, method)
            for status, answer in responses.items():
                for media, content in answer.get("content", {}).items():
                    plain = media.startswith(("text/plain", "application/octet"))
                    assert content["schema"] or plain, (path, method, status)


def test_a_route_that_says_nothing_keeps_what_fastapi_says(make_server: ServerMaker) -> None:
    live = make_server()

    async def mine(number: int) -> None:
        """Mine."""

    async def told() -> None:
        """Told."""

    live.served.api.add_api_route("/mine/{number}", mine, methods=["GET"])
    live.served.api.add_api_route("/told", told, methods=["GET"], responses=response_docs(Leaf))
    live.served.api.openapi_schema = None
    document = live.served.api.openapi()
    answers = document["paths"]["/mine/{number}"]["get"]["responses"]
    assert set(answers) == {"200", "4XX", "5XX"}
    content = document["paths"]["/told"]["get"]["responses"]["200"]["content"]
    assert content == {
        "application/json": {"schema": {"$ref": f"#/components/schemas/{HERE}.Leaf"}}
    }
    assert live.served.api.openapi() is document
