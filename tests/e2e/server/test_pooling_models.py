"""Pooling models over HTTP and offline: real tiny checkpoints against transformers."""

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
import transformers
from safetensors.torch import load_file, save_file
from samples import parametrize_sample

import modulm
from modulm import PoolingParams
from modulm.config import EngineConfig
from modulm.errors import ConfigError, RequestError
from modulm.testing.checkpoints import make_tiny
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import serve_in_thread

ONE = {"id2label": {"0": "fits"}, "label2id": {"fits": 0}}


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder whose tokenizer tells the two texts apart by token types."""
    folder = tmp_path_factory.mktemp("ranker")
    make_tiny(folder, "BertForSequenceClassification", **ONE)
    file = folder / "tokenizer.json"
    from tokenizers import Tokenizer, processors

    core = Tokenizer.from_file(str(file))
    core.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    core.save(str(file))
    return folder


def open_llm(folder: Path, **flags: Any) -> modulm.LLM:
    return modulm.LLM(str(folder), **{"device": "cpu", "dtype": "float32", **flags})


def reference(folder: Path, name: str, ids: list[int], **inputs: Any) -> torch.Tensor:
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        output = model(torch.tensor([ids]), **inputs)
    return output.logits[0] if "logits" in output else output.last_hidden_state[0]


def test_pairs_are_scored_with_their_token_types(ranker: Path) -> None:
    with open_llm(ranker) as llm:
        outputs = llm.score("What is it?", ["It is a cat.", "No"], use_tqdm=False)
        raw = PoolingParams(use_activation=False)
        (plain,) = llm.score("What is it?", "No", pooling_params=raw, use_tqdm=False)
        second = llm.get_tokenizer().fit("What is it?", "No")[1]
    name = "BertForSequenceClassification"
    ids = outputs[1].prompt_token_ids
    types = torch.tensor([[int(index >= (second or 99)) for index in range(len(ids))]])
    expected = reference(ranker, name, ids, token_type_ids=types)
    assert plain.outputs.score == pytest.approx(float(expected), abs=1e-4)
    assert outputs[1].outputs.score == pytest.approx(float(expected.sigmoid()), abs=1e-4)
    without = reference(ranker, name, ids)
    assert abs(float(without - expected)) > 1e-3


def test_classes_and_classes_of_tokens(tmp_path: Path) -> None:
    name = "RobertaForSequenceClassification"
    with open_llm(make_tiny(tmp_path / "texts", name)) as llm:
        (output,) = llm.classify("one two three", use_tqdm=False)
    expected = reference(tmp_path / "texts", name, output.prompt_token_ids).softmax(-1)
    assert output.outputs.probs == pytest.approx(expected.tolist(), abs=1e-4)
    name = "BertForTokenClassification"
    with open_llm(make_tiny(tmp_path / "tokens", name)) as llm:
        (each,) = llm.encode("one two", pooling_task="token_classify", use_tqdm=False)
    expected = reference(tmp_path / "tokens", name, each.prompt_token_ids).softmax(-1)
    assert each.outputs.data == pytest.approx(expected.numpy(), abs=1e-4)


@pytest.mark.parametrize(
    ("saved", "flags"),
    [("LlamaForCausalLM", {"runner": "pooling"}), ("LlamaModel", {})],
)
def test_a_decoder_embeds_by_its_last_token(
    tmp_path: Path, saved: str, flags: dict[str, Any]
) -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = make_tiny(tmp_path / "model", saved, intermediate_size=96, **shape)
    with open_llm(folder, max_num_batched_tokens=8, max_num_seqs=4, **flags) as llm:
        (output,) = llm.embed([list(range(20, 50))], use_tqdm=False)
        assert llm.info.tasks == ("embed", "token_embed")
    states = reference(folder, "LlamaModel", list(range(20, 50)))
    expected = torch.nn.functional.normalize(states[-1], dim=-1)
    assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_decoder_classifies(tmp_path: Path) -> None:
    name = "LlamaForSequenceClassification"
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    folder = make_tiny(tmp_path / "model", name, **labels)
    with open_llm(folder) as llm:
        (output,) = llm.classify([list(range(20, 50))], use_tqdm=False)
    expected = reference(folder, name, list(range(20, 50))).softmax(-1)
    assert output.outputs.probs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_reward_model_rates_each_token(tmp_path: Path) -> None:
    """Saved as Qwen2.5-Math-RM is: two layers, `score.0` and `score.2`, over a bare decoder."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder = make_tiny(tmp_path / "model", "Qwen2Model", intermediate_size=96, **shape)
    file = folder / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    score = {
        f"score.{layer}.{part}": torch.randn(*size, generator=generator)
        for layer, rows in ((0, 64), (2, 1))
        for part, size in (("weight", (rows, 64)), ("bias", (rows,)))
    }
    inner = {f"model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file({**inner, **score}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen2ForRewardModel"]
    (folder / "config.json").write_text(json.dumps(config))
    with open_llm(folder) as llm:
        (output,) = llm.encode([list(range(20, 50))], pooling_task="reward", use_tqdm=False)
        assert llm.info.tasks == ("reward", "token_classify")
    base = transformers.Qwen2Model(transformers.Qwen2Config(**config)).eval()
    base.load_state_dict({name[6:]: tensor for name, tensor in inner.items()})
    with torch.inference_mode():
        states = base(torch.tensor([list(range(20, 50))])).last_hidden_state[0]
    first = torch.relu(states @ score["score.0.weight"].T + score["score.0.bias"])
    expected = first @ score["score.2.weight"].T + score["score.2.bias"]
    assert output.outputs.data == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-3)


def test_a_classifier_rates_each_token_when_asked(tmp_path: Path) -> None:
    name = "LlamaForSequenceClassification"
    folder = make_tiny(tmp_path / "model", name, **ONE)
    ids = list(range(20, 50))
    with open_llm(folder, convert="reward") as llm:
        (output,) = llm.encode([ids], pooling_task="reward", use_tqdm=False)
    last = reference(folder, name, ids)
    assert output.outputs.data.shape == (30, 1)
    assert output.outputs.data[-1] == pytest.approx(last.numpy(), abs=1e-4)
    model = transformers.LlamaForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]
        expected = model.score(states)
    assert output.outputs.data == pytest.approx(expected.numpy(), abs=1e-4)


@parametrize_sample("mode", ["mean", "cls", "lasttoken", "max"], every=2)
def test_the_modules_of_sentence_transformers(tmp_path: Path, mode: str) -> None:
    """Pooling, a dense layer with tanh, and normalisation, as that library stores and runs them."""
    folder = make_tiny(tmp_path / "model", "BertModel")
    kinds = {
        "": "Transformer",
        "1_Pooling": "Pooling",
        "2_Dense": "Dense",
        "3_Normalize": "Normalize",
    }
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    names = {
        "cls": "cls_token",
        "mean": "mean_tokens",
        "max": "max_tokens",
        "lasttoken": "lasttoken",
    }
    flags = {f"pooling_mode_{name}": key == mode for key, name in names.items()}
    write(folder / "1_Pooling", {"word_embedding_dimension": 64, **flags})
    activation = "torch.nn.modules.activation.Tanh"
    dense = {"in_features": 64, "out_features": 24, "bias": True, "activation_function": activation}
    write(folder / "2_Dense", dense)
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(24, 64, generator=generator), torch.randn(24, generator=generator)
    layer = {"linear.weight": weight, "linear.bias": bias}
    save_file(layer, folder / "2_Dense" / "model.safetensors")
    with open_llm(folder) as llm:
        (output,) = llm.embed("one two three", use_tqdm=False)
        (cut,) = llm.embed("one two three", PoolingParams(dimensions=8), use_tqdm=False)
        with pytest.raises(RequestError, match="dimensions"):
            llm.embed("one", PoolingParams(dimensions=25), use_tqdm=False)
    states = reference(folder, "BertModel", output.prompt_token_ids)
    pooled = {
        "cls": states[0],
        "mean": states.mean(0),
        "max": states.max(0)[0],
        "lasttoken": states[-1],
    }
    projected = torch.tanh(weight @ pooled[mode] + bias)
    expected = torch.nn.functional.normalize(projected, dim=-1)
    assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-4)
    short = torch.nn.functional.normalize(projected[:8], dim=-1)
    assert cut.outputs.embedding == pytest.approx(short.tolist(), abs=1e-4)


def write(folder: Path, table: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table))


def test_pooler_config(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", "BertModel")
    with open_llm(folder, pooler_config={"pooling_type": "mean", "normalize": False}) as llm:
        (output,) = llm.embed("one two three", use_tqdm=False)
    expected = reference(folder, "BertModel", output.prompt_token_ids).mean(0)
    assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-4)
    with pytest.raises(ConfigError, match="pooling_type"):
        open_llm(folder, pooler_config={"pooling_type": "sum"})
    with pytest.raises(ConfigError, match="'pool'"):
        open_llm(folder, pooler_config={"pool": "mean"})


@contextmanager
def serving(folder: Path) -> Iterator[httpx.Client]:
    flags = {"model": str(folder), "device": "cpu", "dtype": "float32"}
    config = EngineConfig.from_keywords(**flags)
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as live, live.client() as client:
            yield client
    finally:
        engine.shutdown()


def test_an_encoder_over_http(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", "BertModel")
    with serving(folder) as client:
        body = {"input": ["one two", "three"]}
        plain = client.post("/v1/embeddings", json=body).json()["data"]
        coded = client.post("/v1/embeddings", json={**body, "encoding_format": "base64"}).json()
        tokens = client.post("/pooling", json={"input": "one two", "task": "token_embed"}).json()
        score = client.post("/score", json={"text_1": "one", "text_2": ["one", "three"]}).json()
        refused = client.post("/classify", json={"input": "one"})
    vectors = [np.array(entry["embedding"]) for entry in plain]
    raw = base64.b64decode(coded["data"][1]["embedding"])
    assert np.frombuffer(raw, dtype="<f4") == pytest.approx(vectors[1], abs=1e-5)
    assert [np.linalg.norm(v) for v in vectors] == pytest.approx([1, 1], abs=1e-5)
    states = np.array(tokens["data"][0]["data"])
    assert states[0] == pytest.approx(vectors[0], abs=1e-5)
    scores = [entry["score"] for entry in score["data"]]
    assert scores[0] == pytest.approx(1, abs=1e-5)
    assert scores[1] < 1
    assert refused.status_code == 400


def test_a_cross_encoder_over_http(ranker: Path) -> None:
    documents = ["It is a cat.", "No", "The capital of France is Paris."]
    with serving(ranker) as client:
        request = {"query": "What is it?", "documents": documents, "top_n": 2}
        answers = [client.post(path, json=request).json() for path in ("/v1/rerank", "/v2/rerank")]
        pairs = {"text_1": "What is it?", "text_2": documents}
        scores = [e["score"] for e in client.post("/score", json=pairs).json()["data"]]
        classes = client.post("/classify", json={"input": "No"}).json()["data"]
    with open_llm(ranker) as llm:
        offline = llm.score("What is it?", documents, use_tqdm=False)
    assert scores == pytest.approx([o.outputs.score for o in offline], abs=1e-5)
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    for answer in answers:
        assert [result["index"] for result in answer["results"]] == order
    assert (classes[0]["num_classes"], classes[0]["label"]) == (1, "fits")
