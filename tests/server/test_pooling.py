"""Embeddings, scores, ranks and classes, and what a model for text says to them."""

from __future__ import annotations

import base64
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import httpx
import numpy as np
import openai
import pytest
from attrs import evolve

import modulm
from modulm.contracts.sampling import PoolingParams
from modulm.errors import ConfigError, RequestError
from modulm_route_pooling import io_processing
from modulm_route_pooling.schema import EmbedRequest
from modulm_route_pooling.vectors import encode_vector
from modulm_server.io_processor import IOProcessor
from modulm_server.testing import Live, error_of

ServerMaker = Callable[..., Live]


@pytest.fixture(scope="module")
def pooling(make_server: ServerMaker) -> Live:
    return make_server(info={"tasks": ("embed", "classify")})


@pytest.fixture(scope="module")
def ranker(make_server: ServerMaker) -> Live:
    return make_server(info={"tasks": ("score",)})


def test_embeddings_through_the_client(pooling: Live) -> None:
    with openai.OpenAI(base_url=f"{pooling.url}/v1", api_key="x") as client:
        one = client.embeddings.create(model="M", input="hello")
        many = client.embeddings.create(
            model="M", input=["hello", "world"], encoding_format="float"
        )
        ids = client.embeddings.create(model="M", input=[[5, 6], [7]])
        short = client.embeddings.create(model="M", input="hello", dimensions=4)
    assert one.data[0].embedding == pytest.approx(many.data[0].embedding)
    assert [entry.index for entry in many.data] == [0, 1]
    assert sum(x * x for x in one.data[0].embedding) == pytest.approx(1)
    assert len(ids.data) == 2
    assert len(short.data[0].embedding) == 4
    assert one.usage.total_tokens > 0


def test_prompts_of_keys_and_salts_are_kept_apart(make_server: ServerMaker) -> None:
    live = make_server(info={"tasks": ("embed",)}, api_key=("ann", "bob"))
    for key, more in (("ann", {}), ("bob", {}), ("ann", {}), ("ann", {"cache_salt": "x"})):
        with live.client(headers={"Authorization": f"Bearer {key}"}) as client:
            body = {"model": "M", "input": "hello", **more}
            assert client.post("/v1/embeddings", json=body).status_code == 200
    ann, bob, again, salted = live.engine.salts
    assert ann == again
    assert len({ann, bob, salted}) == 3


def test_base64_is_the_same_numbers(pooling: Live) -> None:
    with pooling.client() as client:
        body = {"model": "M", "input": "hello"}
        plain = client.post("/v1/embeddings", json=body).json()
        coded = client.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
    raw = base64.b64decode(coded["data"][0]["embedding"])
    assert list(struct.unpack("<8f", raw)) == plain["data"][0]["embedding"]


def test_sparse_vectors_leave_the_zeros_out(pooling: Live) -> None:
    with pooling.client() as client:
        body = {"model": "M", "input": "hello"}
        plain = client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
        body |= {"encoding_format": "sparse"}
        sparse = client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    indices = [index for index, value in enumerate(plain) if value]
    assert 0 < len(indices) < len(plain)
    assert sparse == {"indices": indices, "values": [plain[index] for index in indices]}
    request = EmbedRequest(model="M", encoding_format="sparse")
    assert encode_vector(np.array([0.0, 2.5, 0.0, -1.0]), request) == {
        "indices": [1, 3],
        "values": [2.5, -1.0],
    }
    assert encode_vector(np.array([[0.0, 1.0], [0.0, 0.0]]), request) == [
        {"indices": [1], "values": [1.0]},
        {"indices": [], "values": []},
    ]


@pytest.mark.parametrize(
    "kind", ["search_document", "search_query", "classification", "clustering"]
)
def test_cohere_clients_say_what_texts_are_for(pooling: Live, kind: str) -> None:
    """They must; a model without prompts for tasks has nothing to make of it."""
    body = {"model": "M", "texts": ["hello"], "embedding_types": ["float"]}
    with pooling.client() as client:
        plain = client.post("/v2/embed", json=body)
        answer = client.post("/v2/embed", json={**body, "input_type": kind})
        assert answer.status_code == 200, answer.text
        assert answer.json()["embeddings"] == plain.json()["embeddings"]
        wrong = client.post("/v2/embed", json={**body, "input_type": "search"})
        assert wrong.status_code == 400
        assert error_of(wrong)["param"] == "input_type"


def test_other_routes(pooling: Live) -> None:
    with pooling.client() as client:
        classes = client.post("/classify", json={"model": "M", "input": ["a", "b"]}).json()
        assert [entry["num_classes"] for entry in classes["data"]] == [8, 8]
        pooled = client.post("/pooling", json={"input": "a", "task": "embed"}).json()
        assert len(pooled["data"][0]["data"]) == 8
        for path in ("/score", "/v1/score"):
            pair = {"text_1": "same", "text_2": ["same", "else"]}
            scores = [e["score"] for e in client.post(path, json=pair).json()["data"]]
            assert scores[0] == pytest.approx(1)
            assert scores[1] < 1
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            request = {"query": "same", "documents": ["else", {"text": "same"}], "top_n": 1}
            results = client.post(path, json=request).json()["results"]
            assert [(r["index"], r["document"]["text"]) for r in results] == [(1, "same")]


def test_a_model_that_scores_pairs_gets_pairs(ranker: Live) -> None:
    with ranker.client() as client:
        answer = client.post("/score", json={"text_1": "a", "text_2": "b"})
    assert answer.status_code == 200
    expected, _ = ranker.engine.tokenizer.fit("a", "b")
    assert answer.json()["usage"]["prompt_tokens"] == len(expected)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [[]]}, "input"),
        ("/v1/embeddings", {"input": [""]}, "input"),
        ("/v1/embeddings", {"input": None}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 10_001}, "input"),
        ("/v1/embeddings", {"input": [99_999]}, "input"),
        ("/v1/embeddings", {"dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"dimensions": -1}, "dimensions"),
        ("/v1/embeddings", {"dimensions": 10**6}, "dimensions"),
        ("/v1/embeddings", {"encoding_format": "x"}, "encoding_format"),
        ("/v1/embeddings", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"chat_template": "x"}, "chat_template"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "x"}, "instruction"),
        ("/pooling", {"task": "poetry"}, "model"),
        ("/classify", {"input": 5}, "input"),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [5]}, "documents"),
        ("/rerank", {"query": 5, "documents": ["a"]}, "query"),
    ],
)
def test_a158_bad_fields(pooling: Live, path: str, fields: dict[str, Any], param: str) -> None:
    with pooling.client() as client:
        answer = client.post(path, json={"model": "M", "input": "hello", **fields})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_model_for_text_says_so(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == "model"
    assert "--runner pooling" in error["message"]


class Alike(IOProcessor):
    """Answers with the similarity of two texts; fails as it is told."""

    name = "alike"
    api = 1
    released: ClassVar[threading.Event] = threading.Event()

    def parse_data(self, data: Any) -> list[str]:
        if data == "raise":
            raise ValueError("boom")
        if data == "hang":
            Alike.released.wait()
        if not isinstance(data, list):
            raise RequestError("data must be a list of texts", "data")
        return data

    def pre_process(self, value: list[str]) -> list[str]:
        return value

    def merge_pooling_params(self, value: list[str], params: PoolingParams) -> PoolingParams:
        return evolve(params, dimensions=4)

    def post_process(self, value: list[str], outputs: Sequence[np.ndarray]) -> Any:
        return {"texts": value, "width": len(outputs[0]), "same": float(outputs[0] @ outputs[1])}


@pytest.fixture(scope="module")
def processing(make_server: ServerMaker) -> Iterator[Live]:
    modulm.register("io_processors", "alike", Alike)
    yield make_server(info={"tasks": ("embed",)}, io_processor_plugin="alike")
    modulm.unregister("io_processors", "alike")


def test_an_io_processor_that_hangs_is_given_up(
    processing: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request ends after the limit and others do not wait; its thread may still end."""
    monkeypatch.setattr(io_processing, "_LIMIT", 0.05)
    try:
        with processing.client() as client:
            failed = client.post("/pooling", json={"data": "hang"})
            assert failed.status_code == 500
            assert error_of(failed)["message"].endswith("parse_data takes more than 0.05 s")
            monkeypatch.undo()
            answer = client.post("/pooling", json={"data": ["a", "a"]})
            assert answer.json()["data"]["width"] == 4
    finally:
        Alike.released.set()


def test_data_goes_through_the_io_processor(processing: Live, pooling: Live) -> None:
    with processing.client() as client:
        answer = client.post("/pooling", json={"data": ["a", "a"], "request_id": "r"}).json()
        assert answer["data"] == {"texts": ["a", "a"], "width": 4, "same": pytest.approx(1)}
        assert (answer["request_id"], type(answer["created_at"])) == ("r", int)
        assert len(client.post("/pooling", json={"input": "a"}).json()["data"]) == 1
        refused = client.post("/pooling", json={"data": 5})
        assert error_of(refused)["message"] == "data must be a list of texts"
        assert refused.status_code == 400
        both = client.post("/pooling", json={"data": [], "input": "a"})
        assert "send one of them" in error_of(both)["message"]
        empty = client.post("/pooling", json={"data": []})
        assert empty.status_code == 400
        failed = client.post("/pooling", json={"data": "raise"})
        assert failed.status_code == 500
        assert error_of(failed)["code"] == "plugin_failed"
        assert (
            "io_processors/alike (registered): parse_data raised ValueError"
            in (error_of(failed)["message"])
        )
    with pooling.client() as client:
        without = client.post("/pooling", json={"data": ["a"]})
        assert error_of(without)["param"] == "data"
        assert "--io-processor-plugin" in error_of(without)["message"]


def test_a_server_whose_io_processor_fails_does_not_start(make_server: ServerMaker) -> None:
    class Broken(Alike):
        def __init__(self, config: Any) -> None:
            raise ValueError("boom")

    modulm.register("io_processors", "broken", Broken)
    try:
        with pytest.raises(ConfigError, match="io_processor_plugin: broken: boom"):
            make_server(io_processor_plugin="broken")
        with pytest.raises(ConfigError, match="no installed plugin provides IO processor 'nobody'"):
            make_server(io_processor_plugin="nobody")
    finally:
        modulm.unregister("io_processors", "broken")
