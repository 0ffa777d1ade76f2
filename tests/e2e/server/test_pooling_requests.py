"""What a request may say of vectors and pairs, on real tiny models over HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm.testing.checkpoints import make_tiny
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import error_of, serve_in_thread

TEXTS = ["It is a cat.", "No", "The capital of France is Paris."]


@contextmanager
def serving(folder: Path, **flags: Any) -> Iterator[httpx.Client]:
    flags = {"model": str(folder), "device": "cpu", "dtype": "float32", **flags}
    config = EngineConfig.from_keywords(**flags)
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as live, live.client() as client:
            yield client
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with two prompts."""
    folder = make_tiny(tmp_path_factory.mktemp("encoder") / "model", "BertModel")
    types = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": f"x.{kind}", "path": "" if kind == types[0] else kind} for kind in types]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "Pooling").mkdir()
    (folder / "Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    prompts = {"prompts": {"query": "Find: ", "document": "Doc: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with serving(folder) as client:
        yield client


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = make_tiny(tmp_path_factory.mktemp("classes"), "BertForSequenceClassification")
    names = {"id2label": {"0": "up", "1": "down", "2": "level"}}
    with serving(folder, hf_overrides=names) as client:
        yield client


def embed(client: httpx.Client, **fields: Any) -> list[list[float]]:
    answer = client.post("/v1/embeddings", json=fields).raise_for_status().json()
    return [entry["embedding"] for entry in answer["data"]]


STORED = {"float32": "f4", "float16": "f2", "bfloat16": "i2", "fp8_e4m3": "u1"}
ORDERS = ("native", "little", "big")


@parametrize_sample(
    ("dtype", "order"),
    [(dtype, ORDERS[(i + n) % 3]) for i, dtype in enumerate(STORED) for n in range(3)],
    every=3,
)
def test_bytes_in_every_format(client: httpx.Client, dtype: str, order: str) -> None:
    vectors = np.array(embed(client, input=TEXTS), dtype=np.float32)
    body = {"input": TEXTS, "embed_dtype": dtype, "endianness": order}
    whole = client.post("/v1/embeddings", json={**body, "encoding_format": "bytes"})
    bare = client.post("/v1/embeddings", json={**body, "encoding_format": "bytes_only"})
    coded = embed(client, **body, encoding_format="base64")
    assert whole.headers["content-type"] == "application/octet-stream"
    assert whole.content == bare.content == b"".join(map(base64.b64decode, coded))
    assert "metadata" not in bare.headers
    metadata = json.loads(whole.headers["metadata"])
    assert metadata["usage"]["prompt_tokens"] > 0
    offsets = [(item["start"], item["end"], item["shape"]) for item in metadata["data"]]
    size = len(whole.content) // 3
    assert offsets == [(i * size, (i + 1) * size, [64]) for i in range(3)]
    mark = {"native": "=", "little": "<", "big": ">"}[order]
    raw = np.frombuffer(whole.content, dtype=mark + STORED[dtype])
    decoded = raw.astype(raw.dtype.newbyteorder("="))
    if dtype in ("bfloat16", "fp8_e4m3"):
        name = {"bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}[dtype]
        decoded = torch.from_numpy(decoded).view(getattr(torch, name)).float().numpy()
    near = {"float32": 1e-7, "float16": 1e-3, "bfloat16": 4e-3, "fp8_e4m3": 7e-2}[dtype]
    assert decoded.astype(np.float32) == pytest.approx(vectors.ravel(), abs=near)


def test_prompts_by_name(client: httpx.Client) -> None:
    (plain,) = embed(client, input="Find: No")
    (with_prompt,) = embed(client, input="No", prompt_name="query")
    assert with_prompt == plain
    wrong = client.post("/v1/embeddings", json={"input": "No", "prompt_name": "other"})
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "prompt_name")


def test_special_tokens_and_where_a_text_is_cut(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    folder = make_tiny(tmp_path / "model", "BertModel")
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    core.save(str(folder / "tokenizer.json"))
    text = "The capital of France is Paris."
    ids = core.encode(text, add_special_tokens=False).ids
    with serving(folder) as client:
        for fields, expected in (
            ({}, [1, *ids, 2]),
            ({"add_special_tokens": False}, ids),
            ({"truncate_prompt_tokens": 5}, [1, *ids[:3], 2]),
            ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, [1, *ids[-3:], 2]),
            ({"truncate_prompt_tokens": -1}, [1, *ids, 2]),
        ):
            assert embed(client, input=text, **fields) == embed(client, input=expected)
        cut = {"truncate_prompt_tokens": 2}
        assert embed(client, input=ids, **cut) == embed(client, input=ids[:2])
        assert embed(client, input=ids, truncation_side="left", **cut) == embed(
            client, input=ids[-2:]
        )


def test_length_and_messages(client: httpx.Client) -> None:
    for off in ({"normalize": False}, {"use_activation": False}):
        (long,) = embed(client, input="No", **off)
        assert abs(np.linalg.norm(long) - 1) > 1e-3
    messages = [{"role": "user", "content": "No"}]
    (plain,) = embed(client, input="<|im_start|>user\nNo<|im_end|>\n")
    assert embed(client, messages=messages) == [plain]
    continued = embed(client, messages=messages, add_generation_prompt=True)
    assert continued == embed(
        client, input="<|im_start|>user\nNo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_request_has_the_id_that_it_asks_for(client: httpx.Client) -> None:
    body = {"input": "No", "request_id": "mine", "priority": 0}
    assert client.post("/v1/embeddings", json=body).json()["id"] == "embd-mine"


def test_cohere_embeds(client: httpx.Client) -> None:
    (plain,) = embed(client, input="No", prompt_name="document", dimensions=16)
    body = {"texts": ["No"], "input_type": "search_document", "output_dimension": 16}
    kinds = ["float", "base64", "binary", "ubinary"]
    answer = client.post("/v2/embed", json={**body, "embedding_types": kinds}).json()
    by_kind = {kind: vectors[0] for kind, vectors in answer["embeddings"].items()}
    assert by_kind["float"] == plain
    assert np.frombuffer(base64.b64decode(by_kind["base64"]), "<f4") == pytest.approx(plain)
    signs = np.packbits(np.array(plain) >= 0).tolist()
    assert (by_kind["ubinary"], by_kind["binary"]) == (signs, [byte - 128 for byte in signs])
    assert answer["texts"] == ["No"]
    assert answer["meta"]["billed_units"]["input_tokens"] > 0
    mixed = {"inputs": [{"content": [{"type": "text", "text": "No"}]}]}
    (found_mixed,) = client.post("/v2/embed", json=mixed).json()["embeddings"]["float"]
    assert [found_mixed] == embed(client, input="No")
    long = {"texts": ["words and words " * 400]}
    assert client.post("/v2/embed", json=long).status_code == 200
    refused = client.post("/v2/embed", json={**long, "truncate": "NONE"})
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": ["a"], "inputs": [{"text": "a"}]}, "texts"),
        ({"texts": ["a"], "images": ["x"]}, "images"),
        ({"texts": ["a"], "embedding_types": ["int3"]}, "embedding_types"),
        (
            {"texts": ["a"], "output_dimension": 12, "embedding_types": ["binary"]},
            "embedding_types",
        ),
        ({"texts": ["a"], "input_type": "search"}, "input_type"),
        ({"texts": ["a"], "input_type": "clustering"}, "input_type"),
    ],
)
def test_cohere_says_what_is_wrong(client: httpx.Client, body: Any, param: str) -> None:
    answer = client.post("/v2/embed", json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


def test_pairs_under_every_name(client: httpx.Client) -> None:
    names = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"))
    rows = []
    for first, second in (*names, ("queries", "items")):
        body = {first: "What is it?", second: [*TEXTS[:2], {"content": [
            {"type": "text", "text": TEXTS[2]}]}]}  # fmt: skip
        answer = client.post("/score", json=body).raise_for_status().json()
        rows.append([entry["score"] for entry in answer["data"]])
        assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    assert rows[0] == rows[1] == rows[2] == rows[3]
    query = embed(client, input="What is it?", prompt_name="query")
    documents = embed(client, input=TEXTS, prompt_name="document")
    expected = (np.array(documents) @ np.array(query[0])).tolist()
    assert rows[0] == pytest.approx(expected, abs=1e-5)
    zipped = client.post("/score", json={"text_1": TEXTS, "text_2": TEXTS, "prompt_name": ""})
    scores = [entry["score"] for entry in zipped.json()["data"]]
    assert scores == pytest.approx([1, 1, 1], abs=1e-5)


def test_ranks(client: httpx.Client) -> None:
    body = {"query": "What is it?", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    answer = client.post("/v1/rerank", json=body).json()
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    texts = {result["index"]: result["document"]["text"] for result in answer["results"]}
    assert texts == dict(enumerate(TEXTS))
    top = client.post("/v2/rerank", json={**body, "top_n": 2, "return_documents": False}).json()
    assert [sorted(result) for result in top["results"]] == [["index", "relevance_score"]] * 2
    assert [r["index"] for r in top["results"]] == [r["index"] for r in answer["results"][:2]]
    more = client.post("/rerank", json={**body, "top_n": 50}).json()
    assert len(more["results"]) == 3
    short = {**body, "documents": ["It is a cat. " * 9], "max_tokens_per_doc": 4}
    same = {**body, "documents": ["It is a"]}
    shortened, expected = (client.post("/rerank", json=b).json() for b in (short, same))
    assert shortened["usage"] == expected["usage"]
    assert shortened["results"][0]["relevance_score"] == expected["results"][0]["relevance_score"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"queries": ["a"], "items": []}, "items"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": [5]}, "text_2"),
        ("/score", {"data_1": "a", "data_2": {"content": [{"type": "image_url"}]}}, "data_2"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": {"text": 5}, "documents": ["b"]}, "query"),
        ("/v1/embeddings", {"input": "a", "truncation_side": "up"}, "truncation_side"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "int4"}, "embed_dtype"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("/pooling", {"input": "a", "task": "classify"}, "model"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(client: httpx.Client, path: str, body: Any, param: str) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


def test_classes_have_names_and_raw_logits(classifier: httpx.Client) -> None:
    body = {"input": TEXTS}
    data = classifier.post("/classify", json=body).raise_for_status().json()["data"]
    raw = classifier.post("/classify", json={**body, "use_activation": False}).json()["data"]
    names = ("up", "down", "level")
    for entry, logits in zip(data, raw, strict=True):
        values = torch.tensor(logits["probs"]).softmax(-1)
        assert entry["probs"] == pytest.approx(values.tolist(), abs=1e-5)
        assert entry["label"] == names[int(values.argmax())]
        assert entry["num_classes"] == 3
    request = {"messages": [{"role": "user", "content": "No"}]}
    assert len(classifier.post("/classify", json=request).json()["data"]) == 1
    assert classifier.post("/score", json={"text_1": "a", "text_2": "b"}).status_code == 400


def test_a_reranker_with_the_server_s_template(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", "Qwen3ForCausalLM")
    table = {"architectures": ["Qwen3ForSequenceClassification"], "method": "from_2_way_softmax",
             "classifier_from_token": ["n", "y"]}  # fmt: skip
    template = (
        "Is {{ (messages | selectattr('role', 'eq', 'document') | first).content }} "
        "{{ kind | default('about') }} {{ (messages | selectattr('role', 'eq', 'query') | "
        "first).content }}? "
    )
    with serving(folder, hf_overrides=table, chat_template=template) as client:
        pair = {"text_1": "cats", "text_2": "No"}
        scores = [
            client.post("/score", json={**pair, **more}).json()["data"][0]["score"]
            for more in ({}, {"chat_template_kwargs": {"kind": "against"}})
        ]
        classes = [
            client.post("/classify", json={"input": text}).json()["data"][0]["probs"][0]
            for text in ("Is No about cats? ", "Is No against cats? ")
        ]
    assert scores == pytest.approx(classes, abs=1e-6)


@pytest.mark.exhaustive
def test_a_long_text_in_parts(folder: Path) -> None:
    """In an engine of its own process, as served by default."""
    chunked = {"enable_chunked_processing": True}
    with serving(folder, pooler_config=chunked, max_model_len=16) as client:
        ids = list(range(20, 60))
        (whole,) = embed(client, input=ids)
        parts = [embed(client, input=ids[at : at + 16], normalize=False) for at in (0, 16, 32)]
        usage = client.post("/v1/embeddings", json={"input": ids}).json()["usage"]
    expected = np.average([part[0] for part in parts], axis=0, weights=[16, 16, 8])
    assert whole == pytest.approx((expected / np.linalg.norm(expected)).tolist(), abs=1e-5)
    assert usage["prompt_tokens"] == 40
