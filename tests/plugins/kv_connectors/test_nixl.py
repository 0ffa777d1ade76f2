"""Blocks through NIXL: a stand-in of its documented API, and the package where it is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugins.kv_connectors.test_peer import (
    FLAGS,
    PARAMS,
    PROMPTS,
    STORED,
    ask,
    engine,
    free_port,
    prefill,
    results,
)
from tests.support import nixl_stand_in

from modulm import LLM
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny
from modulm_kv_peer.nixl import NixlAgent
from modulm_kv_peer.wire import Deadline, Fault


@pytest.fixture(params=["stand-in", pytest.param("package", marks=pytest.mark.exhaustive)])
def nixl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name = str(request.param)
    if name == "stand-in":
        monkeypatch.setitem(sys.modules, "nixl", nixl_stand_in)
        monkeypatch.setitem(sys.modules, "nixl._api", nixl_stand_in)
        nixl_stand_in.reads.clear()
        return name
    try:
        importlib.import_module("nixl._api")
    except ImportError:
        pytest.skip("nixl is not installed")
    return name


@pytest.fixture
def agents(nixl: str) -> Iterator[Callable[[], NixlAgent]]:
    with ExitStack() as stack:

        def agent() -> NixlAgent:
            made = NixlAgent(["UCX"])
            stack.callback(made.close)
            return made

        yield agent


def test_slots_of_a_peer_are_read(agents: Callable[[], NixlAgent]) -> None:
    store = torch.randint(0, 255, (40, 96), dtype=torch.uint8)
    producer, consumer = agents(), agents()
    assert producer.describe() is None
    producer.register(store)
    described = producer.describe()
    assert described is not None
    for _ in range(2):  # the second reader gets the first one's memory
        with consumer.reader(described, 96) as reader:
            assert len(reader) == 40
            slots = [39, 0, *range(5, 25)]
            rows = reader.rows(slots, [(0, 96)], Deadline(20))
            assert len(rows) == 16
            assert torch.equal(torch.stack(rows), store[slots[:16]])
            (row,) = reader.rows([7], [(0, 8), (90, 96)], Deadline(20))
            assert torch.equal(row, torch.cat([store[7, :8], store[39, 8:90], store[7, 90:]]))
    assert [len(free) for free in consumer._buffers.values()] == [1]


def test_what_is_not_registered_is_a_fault(agents: Callable[[], NixlAgent]) -> None:
    store = torch.zeros((4, 32), dtype=torch.uint8)
    producer, consumer = agents(), agents()
    producer.register(store)
    described: Any = producer.describe()
    reader = consumer.reader({**described, "slots": 900_000}, 32)
    with reader, pytest.raises(Fault, match="NIXL"):
        reader.rows([800_000], [(0, 32)], Deadline(20))
    assert not any(consumer._buffers.values())  # a transfer may still write there
    with pytest.raises(Fault, match="NIXL cannot reach it"):
        consumer.reader({**described, "metadata": b"anything"}, 32)
    with pytest.raises(Fault, match="cannot be read"):
        consumer.reader({**described, "address": "x"}, 32)


def test_engines_exchange_blocks(nixl: str, tmp_path: Path) -> None:
    model = str(make_tiny(tmp_path, "Qwen3ForCausalLM"))
    with LLM(model, **FLAGS) as llm:
        expected = results(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    options = {"backends": ["UCX"], "shared_memory": False}
    with (
        engine(model, "kv_producer", free_port(), options) as first,
        engine(model, "kv_consumer", 1, options) as second,
        engine(model, "kv_consumer", 1, {"shared_memory": False}) as plain,
    ):
        params = prefill(first)
        outputs = ask(second, PARAMS, params)
        assert results(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [STORED] * 3
        if nixl == "stand-in":  # two blocks of each prompt, and none of them through the socket
            assert len(nixl_stand_in.reads) == 2 * len(PROMPTS)
        assert results(ask(plain, PARAMS, params)) == expected
        if nixl == "stand-in":
            assert len(nixl_stand_in.reads) == 2 * len(PROMPTS)


def test_a_missing_package_or_backend_is_named(nixl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if nixl == "stand-in":
        with pytest.raises(ConfigError, match="NIXL cannot use ABC"):
            NixlAgent(["ABC"])
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match=r"pip install .modulm-kv-peer\[nixl\]"):
        NixlAgent(["UCX"])
