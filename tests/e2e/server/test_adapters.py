"""Adapters of a real server, of two processes before one engine: the embedded model, and PEFT
folders of random weights.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tests.e2e.server.test_serve import Process, started

from modulm.cli.main import cli
from modulm.config import EngineConfig
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm.testing.adapters import write_lora

PROMPT = "The plugins of an engine are"
NAMES = ("sql", "poet", "critic", None)


def write(path: Path, seed: int, rank: int = 4, **config: Any) -> Path:
    """An adapter of the embedded model that says something else."""
    attention = {"q_proj": (256, 256), "v_proj": (256, 128), "o_proj": (256, 256)}
    modules = {
        f"model.layers.{layer}.self_attn.{name}": shape
        for layer in range(6)
        for name, shape in attention.items()
    }
    config = {"target_modules": list(attention), "lora_alpha": 1, **config}
    return write_lora(path, modules, rank, seed, **config)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    model = open_checkpoint(EngineConfig.from_keywords(model="demo"), manager.current()).path
    (root / "demo").symlink_to(model)
    for seed, name in enumerate(("sql", "poet", "critic", "loads/new", "found/late")):
        write(root / name, seed)
    write(root / "loads/wide", 9, rank=64)
    shaped = write(root / "loads/shaped", 9) / "adapter_model.safetensors"
    tensors = load_file(shaped)
    name = next(name for name in tensors if "lora_A" in name)
    save_file({**tensors, name: torch.zeros(4, 255)}, shaped)
    broken = write(root / "loads/broken", 9) / "adapter_model.safetensors"
    save_file({**tensors, name: torch.full((4, 256), torch.nan)}, broken)
    (write(root / "loads/bare", 9) / "adapter_config.json").unlink()
    return root


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[Process]:
    with started(
        folder / "demo", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2",
        "--lora-modules", f"sql={folder / 'sql'}", f"poet={folder / 'poet'}",
        json.dumps({"name": "critic", "path": str(folder / "critic"), "base_model_name": "M"}),
        "--allow-runtime-lora-updating", "--allowed-lora-path", str(folder / "loads"),
        "--lora-resolver-folder", str(folder / "found"), "--api-server-count", "2",
        "--dtype", "float32", "--max-num-seqs", "16",
    ) as process:  # fmt: skip
        yield process


@pytest.fixture
def client(process: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: openai.OpenAI, name: str | None, tokens: int = 12, **more: Any) -> str:
    answer = client.completions.create(
        model=name or "M", prompt=PROMPT, max_tokens=tokens, temperature=0,
        extra_body={"ignore_eos": True, **more},
    )  # fmt: skip
    assert answer.model == (name or "M")
    return answer.choices[0].text


def load(client: openai.OpenAI, name: str, path: Path, **more: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **more}
    return httpx.post(f"{client.base_url}load_lora_adapter", json=body, timeout=300)


def unload(client: openai.OpenAI, name: str) -> httpx.Response:
    body = {"lora_name": name}
    return httpx.post(f"{client.base_url}unload_lora_adapter", json=body, timeout=300)


def test_they_are_listed_beside_the_model(client: openai.OpenAI, folder: Path) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert [*cards][:4] == ["M", "sql", "poet", "critic"]
    assert cards["critic"]["parent"] == "M"
    assert cards["sql"]["root"] == str(folder / "sql")


def test_eight_streams_at_once_say_what_each_says_alone(client: openai.OpenAI) -> None:
    """Three adapters and the model, with two slots: some wait, all end."""
    texts = {name: complete(client, name) for name in NAMES}
    assert len(set(texts.values())) == 4
    together = threading.Barrier(8)

    def stream(name: str | None) -> str:
        together.wait(300)
        chunks = client.completions.create(
            model=name or "M", prompt=PROMPT, max_tokens=12, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(8) as pool:
        streamed = list(pool.map(stream, NAMES * 2))
    assert streamed == [texts[name] for name in NAMES * 2]


def test_unloaded_while_in_use_it_finishes(client: openai.OpenAI, folder: Path) -> None:
    assert load(client, "new", folder / "loads/new").status_code == 200
    whole = complete(client, "new", 100)
    chunks = client.completions.create(
        model="new", prompt=PROMPT, max_tokens=100, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "stream_options": {"include_usage": True}},
    )  # fmt: skip
    pieces = [next(chunks).choices[0].text]
    assert unload(client, "new").status_code == 200
    with pytest.raises(openai.NotFoundError) as caught:
        complete(client, "new")
    assert caught.value.code == "model_not_found"
    rest = [chunk for chunk in chunks if chunk.choices]
    assert rest[-1].choices[0].finish_reason == "length"
    assert "".join([*pieces, *(chunk.choices[0].text for chunk in rest)]) == whole


def test_loaded_anew_it_says_something_else(client: openai.OpenAI, folder: Path) -> None:
    path = write(folder / "loads/changing", 20)
    assert load(client, "changing", path).status_code == 200
    first = complete(client, "changing")
    response = load(client, "changing", path)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_name")
    write(path, 21)
    assert complete(client, "changing") == first
    assert load(client, "changing", path, load_inplace=True).status_code == 200
    assert complete(client, "changing") != first
    write(path, 20)
    assert load(client, "changing", path, load_inplace=True).status_code == 200
    assert complete(client, "changing") == first
    assert unload(client, "changing").status_code == 200


@pytest.mark.parametrize(
    ("name", "why"),
    [("wide", "rank"), ("shaped", "255"), ("broken", "lora_A"), ("bare", "adapter_config.json"),
     ("nowhere", "not a folder"), ("../sql", "outside")],
)  # fmt: skip
def test_a_bad_one_is_named_and_the_others_go_on(
    client: openai.OpenAI, folder: Path, name: str, why: str
) -> None:
    before = complete(client, "sql", 3)
    answer = load(client, "bad", folder / "loads" / name)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith("adapter 'bad' cannot be loaded: ")
    assert why in error["message"]
    assert complete(client, "sql", 3) == before
    with pytest.raises(openai.NotFoundError):
        complete(client, "bad")


def test_an_unknown_name_is_404_and_a_folder_is_found(client: openai.OpenAI) -> None:
    for name in ("nobody", "../sql", "found/late"):
        with pytest.raises(openai.NotFoundError):
            complete(client, name)
    assert complete(client, "late") != complete(client, None)


def test_metrics_count_by_adapter(client: openai.OpenAI, process: Process) -> None:
    complete(client, "poet")
    text = httpx.get(f"{process.url}/metrics").text
    (line,) = [line for line in text.splitlines() if 'requests_total{adapter="poet"' in line]
    assert float(line.rpartition(" ")[2]) >= 1
    assert 'modulm:lora_requests_info{max_lora="2"' in text


def test_a_batch_names_them(folder: Path, tmp_path: Path, client: openai.OpenAI) -> None:
    rows = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions",
         "body": {"model": name or "M", "prompt": PROMPT, "max_tokens": 12, "temperature": 0,
                  "ignore_eos": True}}
        for n, name in enumerate(NAMES)
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    modules = [f"{name}={folder / name}" for name in NAMES if name]
    result = CliRunner().invoke(cli, [
        "run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"),
        "--model", str(folder / "demo"), "--served-model-name", "M", "--dtype", "float32",
        "--max-model-len", "256", "--enable-lora", "--lora-modules", *modules, "--no-progress",
        "--disable-frontend-multiprocessing",
    ])  # fmt: skip
    assert result.exit_code == 0, result.output
    answers = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    for n, name in enumerate(NAMES):
        assert bodies[str(n)]["choices"][0]["text"] == complete(client, name)
