"""Encoder outputs of one engine, used by another: by files of the host and over the wire."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from tests.plugins.kv_connectors.test_peer import drain, free_port
from tests.plugins.models.test_images import FAMILIES, driver
from tests.support.samples import parametrize_sample

from modulm import LLM, SamplingParams
from modulm.contracts.executor import RowStart
from modulm.errors import ConfigError
from modulm.testing.media import item_of
from modulm_kv_peer.encoder_outputs import PeerEncoderOutputs
from modulm_kv_transfer.encoder_outputs import EncoderTransfer, FileEncoderOutputs
from modulm_media.step.runner import MediaRunner
from modulm_media.step.values import EncodePlan, MediaRow
from modulm_towers.multimodal import MultimodalModel
from modulm_towers.testing import ImageFamily, images, write_family

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_num_batched_tokens": 256, "cpu_threads": 1,
    "enable_prefix_caching": False,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
TRANSFER = EncoderTransfer("0" * 32, {"model": "a"}, produces=True, consumes=True)
MODELS = [
    "LlavaForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",  # outputs are wider than embeddings
    "Mistral3ForConditionalGeneration",  # with embeddings of text between them
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Any]]:
    """Returns a checkpoint of the architecture and a prompt with two images."""
    made: dict[str, tuple[str, Any]] = {}

    def model(architecture: str = MODELS[0]) -> tuple[str, Any]:
        if architecture not in made:
            tokens, processor, more = FAMILIES[architecture]
            family = ImageFamily(driver(architecture), tokens, processor, **more)
            folder = tmp_path_factory.mktemp("model")
            write_family(family, folder)
            mark = family.mark or tokens["image_token"]
            pictures = images(family.sizes[:2])
            prompt = {"prompt": f"A {mark} or {mark}", "multi_modal_data": {"image": pictures}}
            made[architecture] = str(folder), prompt
        return made[architecture]

    return model


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of items of each run of an encoder."""
    runs, features = [], MultimodalModel._encoded

    def noted(self: Any, items: Any) -> Any:
        runs.append(len(items))
        return features(self, items)

    monkeypatch.setattr(MultimodalModel, "_encoded", noted)
    return runs


def engine(path: str, role: str | None, folder: Path, **more: Any) -> LLM:
    options = {"shared_storage_path": str(folder), **more.pop("options", {})}
    table = {
        "ec_connector": more.pop("connector", "ECExampleConnector"), "ec_role": role,
        "ec_port": more.pop("port", 1), "ec_connector_extra_config": options,
    }  # fmt: skip
    return LLM(path, **SETTINGS | more, **({"ec_transfer_config": table} if role else {}))


def answer(llm: LLM, prompt: Any) -> Any:
    (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
    drain(llm)
    return output.outputs[0].token_ids, output.outputs[0].logprobs


@parametrize_sample("architecture", MODELS, 3)
def test_an_encoder_only_engine_encodes_for_another(
    architecture: str, model: Callable[..., Any], tmp_path: Path, encoded: list[int]
) -> None:
    path, prompt = model(architecture)
    with engine(path, None, tmp_path) as alone:
        expected = answer(alone, prompt)
    with engine(path, "ec_producer", tmp_path, mm_encoder_only=True) as encoder:
        encoder.encode(prompt, pooling_task="token_embed", use_tqdm=False)
    encoded.clear()
    with engine(path, "ec_consumer", tmp_path) as second:
        assert answer(second, prompt) == expected
    assert encoded == []
    # In pieces, while another request decodes.
    with engine(path, "ec_both", tmp_path, mm_encoder_chunk=1) as third:
        texts = [{"prompt": "No image"}, prompt]
        both = third.generate(texts, [PARAMS.with_(max_tokens=12), PARAMS], use_tqdm=False)
        assert both[1].outputs[0].token_ids == expected[0]
    assert encoded == []
    for file in tmp_path.glob("*/*/*/*.kv"):
        file.write_bytes(file.read_bytes()[:-1])
    with engine(path, "ec_consumer", tmp_path) as fourth:
        assert answer(fourth, prompt) == expected
    assert sum(encoded) == 2


@pytest.mark.exhaustive
def test_two_ranks_load_what_one_has_encoded(model: Callable[..., Any], tmp_path: Path) -> None:
    path, prompt = model()
    ranks = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}
    with engine(path, None, tmp_path, **ranks) as alone:
        expected = answer(alone, prompt)
    with engine(path, "ec_producer", tmp_path, mm_encoder_only=True) as encoder:
        encoder.encode(prompt, pooling_task="token_embed", use_tqdm=False)
    (first, second) = tmp_path.glob("*/*/*/*.kv")
    for file in (first, second):
        os.utime(file, (1, 1))
    with engine(path, "ec_consumer", tmp_path, **ranks) as consumer:
        assert answer(consumer, prompt) == expected
    assert min(first.stat().st_mtime, second.stat().st_mtime) > 1
    first.unlink()
    with engine(path, "ec_consumer", tmp_path, **ranks) as consumer:
        assert answer(consumer, prompt) == expected


def test_outputs_come_over_the_wire(
    model: Callable[..., Any], tmp_path: Path, encoded: list[int], caplog: Any
) -> None:
    path, prompt = model()
    port = free_port()
    here, there = tmp_path / "here", tmp_path / "there"
    peers = {"peers": [f"127.0.0.1:{port}"], "timeout": 5.0}
    with engine(path, "ec_consumer", here, connector="peer", options=peers) as second:
        with engine(path, "ec_producer", there, connector="peer", port=port) as first:
            expected = answer(first, prompt)
            encoded.clear()
            assert answer(second, prompt) == expected
            assert encoded == []
        # The encoder was stopped: what it did not send is computed.
        pictures = images([p.size for p in prompt["multi_modal_data"]["image"]], seed=5)
        other = {**prompt, "multi_modal_data": {"image": pictures}}
        found = answer(second, other)
        assert encoded
    assert "encoder outputs are computed: 127.0.0.1" in caplog.text
    with engine(path, None, tmp_path) as alone:
        assert answer(alone, other) == found
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_files_keep_the_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    outputs = FileEncoderOutputs(tmp_path, 1 << 20, "0" * 32)
    assert outputs.load(b"a") is None
    output = torch.randn(5, 8, 2)[..., 0].to(dtype)
    outputs.save(b"a", output)
    outputs.save(b"a", output + 1)  # stored already
    loaded = FileEncoderOutputs(tmp_path, 1 << 20, "0" * 32).load(b"a")
    assert loaded is not None
    assert torch.equal(loaded, output)
    assert FileEncoderOutputs(tmp_path, 1 << 20, "1" * 32).load(b"a") is None


def test_files_are_bounded_and_checked(tmp_path: Path, caplog: Any) -> None:
    outputs = FileEncoderOutputs(tmp_path, 40_000, "0" * 32)
    for number in range(20):
        outputs.save(bytes([number]), torch.full((10, 100), float(number)))
    files = list(tmp_path.glob("*/*/*/*.kv"))
    assert 0 < sum(file.stat().st_size for file in files) <= 40_000
    assert outputs.has(bytes([19]))
    with pytest.raises(OSError, match="too small"):
        outputs.save(b"large", torch.zeros(200, 100))
    path = outputs.path(bytes([19]))
    content = path.read_bytes()
    line = content.index(b"\n")
    for torn in (content[:-3], content[:20], b"", content[:line].replace(b"[10, ", b"[20, "),
                 content[:-1] + b"\x77"):  # fmt: skip
        path.write_bytes(torn)
        assert outputs.load(bytes([19])) is None
        assert not path.exists()
    assert caplog.text.count("cannot be read and is computed") == 1


class _Other:
    """Two ranks; the other one has only the first item."""

    rank, size = 0, 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(len(x)).eq(0).to(x.dtype)


def test_ranks_load_what_all_of_them_have(tmp_path: Path) -> None:
    runs: list[bytes] = []

    def encode(items: Any) -> list[torch.Tensor]:
        runs.extend(item.hash for item in items)
        return [torch.zeros(item.length, 4) for item in items]

    made = SimpleNamespace(media=("image",), caches=(), encode=encode)
    built: Any = SimpleNamespace(
        config=SimpleNamespace(scheduler=None, group=lambda kind: kind()),
        loaded=SimpleNamespace(model=made, groups=()),
        platform=SimpleNamespace(device=torch.device("cpu")), mesh=SimpleNamespace(world=_Other()),
    )  # fmt: skip
    outputs = FileEncoderOutputs(tmp_path, 1 << 20, "0" * 32)
    items = [item_of([1, 2], 0), item_of([3], 2), item_of([4, 5, 6], 3)]
    for item in items[:2]:
        outputs.save(item.hash, torch.ones(item.length, 4))
    runner = MediaRunner(built, outputs, TRANSFER)
    start: Any = RowStart(0, "a", PARAMS, np.zeros(6), np.zeros(0), 0)
    runner.admit(start, MediaRow(tuple(items)))
    plan: Any = SimpleNamespace(rows=np.zeros(1, np.int32))
    done = runner.begin(plan, EncodePlan(((0, 0), (0, 1), (0, 2))))
    assert done == (items[0].hash,)
    assert runs == [items[1].hash, items[2].hash]
    stored = outputs.load(items[2].hash)
    assert stored is not None
    assert stored.shape == (3, 4)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[PeerEncoderOutputs, Callable[..., Any]]]:
    """A producer, and what makes consumers of its outputs."""
    opened: list[PeerEncoderOutputs] = []
    transfer = evolve(TRANSFER, consumes=False, port=free_port())

    def peer(name: str, transfer: EncoderTransfer, **more: Any) -> PeerEncoderOutputs:
        outputs = PeerEncoderOutputs(tmp_path / name, 1 << 20, transfer, **more)
        opened.append(outputs)
        outputs.start()
        return outputs

    def consumer(**changes: Any) -> PeerEncoderOutputs:
        here = evolve(transfer, produces=False, consumes=True, **changes)
        return peer("here", here, peers=[f"127.0.0.1:{transfer.port}"], seconds=2.0)

    yield peer("there", transfer), consumer
    for outputs in opened:
        outputs.close()


def fetch(outputs: PeerEncoderOutputs, *items: bytes) -> list[bool]:
    while not outputs.fetch("request", items):
        with suppress(KeyError):
            outputs._fetches["request"].result()
    outputs.finish("request")
    return [outputs.load(item) is not None for item in items]


def test_what_a_peer_has_is_fetched(pair: Any) -> None:
    producer, consumer = pair
    producer.save(b"a", torch.randn(3, 4).bfloat16())
    second = consumer()
    assert fetch(second, b"a", b"b") == [True, False]
    assert torch.equal(second.load(b"a"), producer.load(b"a"))
    producer.close()
    assert second.fetch("other", [b"a"])
    assert fetch(second, b"b") == [False]


def test_another_model_is_refused_by_name(pair: Any, caplog: Any) -> None:
    producer, consumer = pair
    producer.save(b"a", torch.randn(3, 4))
    assert fetch(consumer(facts={"model": "b"}), b"a") == [False]
    assert "refused: model is a where the blocks are, and b here" in caplog.text


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"ec_connector": "disk"}, "ec_role: None is not one of ec_both, ec_producer"),
        ({"ec_role": "ec_both"}, "ec_connector: must be the name"),
        ({"ec_connector": "disc", "ec_role": "ec_both"}, "'disc' is not one of ECExample"),
        ({"ec_connector": "host", "ec_role": "ec_both"}, "host stores no encoder outputs"),
        ({"ec_connector": "ECMooncakeConnector", "ec_role": "ec_both"}, "not supported: peer"),
        ({"ec_conector": "disk"}, "did you mean"),
        ({"ec_connector": "disk", "ec_buffer_size": 1}, "ec_buffer_size is not supported"),
        ({"ec_connector": "peer", "ec_role": "ec_both", "ec_port": 0}, "ec_port: must be a port"),
        ({"ec_connector": "peer", "ec_role": "ec_both",
          "ec_connector_extra_config": {"peers": ["x"]}}, "'x' is not HOST:PORT"),
    ],
)  # fmt: skip
def test_bad_configuration_is_refused(table: Any, message: str, model: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model()[0], **SETTINGS, ec_transfer_config=table)
