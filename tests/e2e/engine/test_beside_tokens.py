"""Adapters, media and moved cache blocks through the whole engine on a tiny real model.

What front ends and checkpoints of these features bring is not there yet: requests are made by hand.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attrs import field, frozen
from safetensors.torch import save_file
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.core.engine_core import EngineCore
from modulm.errors import RequestError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.testing.adapters import FakeAdapters
from modulm.testing.checkpoints import make_tiny
from modulm.testing.connectors import FakeConnector
from modulm.testing.engines import Recorder
from modulm.testing.media import place_items, seeing

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("beside") / "tiny")


def open_core(folder, plugins, **flags) -> tuple[EngineCore, Recorder]:
    seen = Recorder()
    config = EngineConfig.from_keywords(
        model=str(folder), dtype="float32", max_num_seqs=6, max_num_batched_tokens=32,
        max_model_len=128, num_gpu_blocks_override=65, block_size=16, **flags,
    )  # fmt: skip
    with manager.using(plugins):
        return EngineCore(config, plugins, seen), seen


def run(core, seen, requests) -> dict[str, list[int]]:
    """The tokens of requests that run together."""
    core.submit(*requests)
    while core.loop.tick():
        pass
    assert not [end for end in seen.finished.values() if end.error], seen.finished
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    for name, tokens in seen.tokens.items():
        if name in found:
            found[name] = list(tokens)
    return found


def request(name, prompt, **more) -> Request:
    return Request(id=name, prompt=prompt, params=PARAMS, **more)


@pytest.fixture(scope="module")
def plain(folder) -> Iterator[tuple[EngineCore, Recorder]]:
    core, seen = open_core(folder, PluginManager())
    yield core, seen
    core.stop()


def test_items_of_a_prompt_give_what_their_words_give(folder, plain) -> None:
    """Chunks of 32 tokens cut prompts inside of items; equal items are encoded once."""
    plugins = PluginManager()
    model = seeing(plugins.load("models", "LlamaForCausalLM"))
    plugins.register("models", "LlamaForCausalLM", model)
    core, seen = open_core(folder, plugins)
    long, short = list(range(60, 85)), [40, 41, 42]
    prompts = {"a": [5, long, 6, short, 7], "b": [9, 8, short, 7], "c": [long, long, 11]}
    words = {
        name: [w for part in prompt for w in (part if isinstance(part, list) else [part])]
        for name, prompt in prompts.items()
    }
    expected = run(*plain, [request(name, prompt) for name, prompt in words.items()])
    for again in ("", "2"):  # the second time prefixes are found by the items' hashes
        asked = []
        for name, prompt in prompts.items():
            tokens, items = place_items(prompt)
            asked.append(request(name + again, tokens, media=items))
        found = run(core, seen, asked)
        assert {name: found[name + again] for name in expected} == expected
    assert len(model.encoded) >= 2
    tokens, items = place_items([5, list(range(100, 140))])
    with pytest.raises(RequestError):
        core.loop.scheduler.add(request("big", tokens, media=items))
    core.stop()


def test_requests_use_their_adapters_more_than_there_are_slots(folder, tmp_path, plain) -> None:
    plugins = PluginManager()
    plugins.register("adapters", "fake", FakeAdapters)
    tables = {"adapters": {"fake": {"slots": 2}}}
    core, seen = open_core(folder, plugins, plugin_config=tables)
    bank = core.executor._worker.loaded.adapters
    for seed, name in enumerate("xyz"):
        torch.manual_seed(seed)
        save_file({
            f"{layer}.{side}": 0.3 * torch.randn(held.shape[1:])
            for layer, pair in bank.layers.items()
            for side, held in (("down", pair.down), ("up", pair.up))
        }, tmp_path / f"{name}.safetensors")  # fmt: skip
        core.executor.add_adapter(name, tmp_path / f"{name}.safetensors")
    prompt = list(range(20, 60))
    alone = {
        name: run(core, seen, [request(f"alone {name}", prompt, adapter=name)])[f"alone {name}"]
        for name in "xyz"
    }
    base = run(*plain, [request("base", prompt)])["base"]
    assert len({tuple(tokens) for tokens in (*alone.values(), base)}) == 4
    asked = [request(f"{name}{n}", prompt, adapter=name) for n in range(2) for name in "xyz"]
    found = run(core, seen, [*asked, request("none", prompt)])
    assert found.pop("none") == base
    assert found == {name: alone[name[0]] for name in found}
    core.stop()


STORE: dict[bytes, object] = {}


@frozen
class Options:
    """Every how many transfers one fails."""

    fails: int = field(default=10**6)


class Shared(FakeConnector):
    """Connectors of all engines keep their blocks in one place."""

    Config = Options

    def __init__(self, options: Options) -> None:
        super().__init__(
            delay=lambda identity: identity % 3,
            fails=lambda identity: identity % options.fails == options.fails - 1,
            hesitates=lambda name, asked: asked < 2,
            store=STORE,
        )


@parametrize_sample("fails", [2, 10**6], every=2)
def test_blocks_from_another_engine_change_no_token(folder, plain, fails) -> None:
    STORE.clear()
    prompts = {f"r{n}-{fails}": [7, *range(100, 160), n] for n in range(4)}
    asked = [request(name, prompt) for name, prompt in prompts.items()]
    expected = run(*plain, asked)
    for _ in range(2):
        plugins = PluginManager()
        plugins.register("kv_connectors", "shared", Shared)
        tables = {"kv_connectors": {"shared": {"fails": fails}}}
        core, seen = open_core(folder, plugins, plugin_config=tables)
        assert run(core, seen, asked) == expected
        core.stop()
    assert STORE
