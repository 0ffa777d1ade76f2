"""On a machine with little memory, an engine allocates less, and says so."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading

import pytest

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.contracts.platform import Memory
from modulm.errors import CheckpointError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm_command_explain.command import decisions_for
from modulm_memory import estimate as estimates
from modulm_memory import usage
from modulm_memory.estimate import estimate
from modulm_memory.fitting import stored_bytes
from modulm_platform_cpu.platform import CpuPlatform
from modulm_server import memory_metrics
from modulm_server.memory_metrics import EngineMemory
from modulm_server.models.hosted_model import HostedModel
from modulm_server.models.memory import Needs, changes_within, needs_of
from modulm_server.models.settings import ModelSettings

MIB = 1 << 20


@pytest.fixture
def small(monkeypatch):
    """A machine whose free memory a test states."""

    def state(size):
        memory = Memory(total=size, free=size)
        monkeypatch.setattr(CpuPlatform, "memory_per_worker", lambda self, workers: memory)

    return state


def test_a_default_start_reduces_steps_and_caches_and_says_so(small, caplog):
    small(24 * MIB)
    with caplog.at_level(logging.INFO):
        llm = LLM("demo")
        scheduler = llm.info.config.scheduler
        assert scheduler.max_num_seqs < CpuPlatform.sequences[0]
        assert scheduler.max_num_batched_tokens < CpuPlatform.batched_tokens[0]
        said = caplog.text
        assert f"max_num_seqs is {scheduler.max_num_seqs}: " in said
        assert f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}: " in said
        held = estimate(llm.info.config, manager.current())
        (rank,) = held.ranks
        assert rank.fixed + rank.step + rank.cache_bytes <= 24 * MIB
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        prompts = [f"{number} " * 100 for number in range(4)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [4] * 4
        llm.shutdown()


def test_weights_that_do_not_fit_are_refused_unread_with_commands_that_fit(small, monkeypatch):
    monkeypatch.setattr("modulm.loading.model.fill", None)
    small(14 * MIB)
    flags = {"seed": 7, "kv_cache_dtype": "bfloat16"}
    with pytest.raises(CheckpointError, match=r"the weights need .* 14.0 MiB free of") as raised:
        LLM("demo", **flags)
    command = str(raised.value).rpartition("modulm serve demo ")[2]
    assert {"--seed 7", "--quantization"} <= {*re.findall(r"--seed 7|--quantization", command)}
    with pytest.raises(CheckpointError, match="no format or length fits: use a smaller model"):
        LLM("demo", **flags, quantization="none")
    assert estimate(EngineConfig.from_keywords(), manager.current()).problem
    monkeypatch.undo()
    LLM("demo", kv_cache_memory_bytes=1 << 20).shutdown()


def test_settings_of_the_user_stay(small):
    small(24 * MIB)
    config = EngineConfig.from_keywords(max_num_seqs=64, max_num_batched_tokens=512)
    resolved = estimate(config, manager.current()).config.scheduler
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (64, 512)


def test_ample_memory_changes_nothing_and_needs_no_estimate(small, monkeypatch):
    small(64 << 30)
    config = EngineConfig.from_keywords()
    plain = estimate(config, manager.current()).config
    calls = []
    monkeypatch.setattr(estimates, "estimate", lambda *_, **__: calls.append(1))
    resolved = estimate(config.with_parts({"quantization": "auto"}), manager.current()).config
    assert resolved.model.quantization is None
    assert not calls
    assert resolved.scheduler == plain.scheduler


@pytest.mark.parametrize(
    ("free", "formats"), [(64, {None}), (24, {None}), (11, {"int8", "fp8", "int4"})]
)
def test_auto_takes_the_best_format_that_fits(small, free, formats):
    small(free * MIB)
    config = EngineConfig.from_keywords(quantization="auto")
    found = estimate(config, manager.current())
    assert found.config.model.quantization in formats
    assert found.context
    if found.config.model.quantization:
        as_stored = estimate(config.with_parts({"quantization": None}), manager.current())
        assert as_stored.context < found.context


def test_an_automatic_length_is_the_longest_that_fits_and_is_said(caplog):
    flags = {"max_model_len": "auto", "kv_cache_memory_bytes": MIB, "max_num_seqs": 1}
    with caplog.at_level(logging.INFO), LLM("demo", **flags) as llm:
        length, config = llm.info.max_model_len, llm.info.config
    found = estimate(EngineConfig.from_keywords(**flags), manager.current())
    (rank,) = found.ranks
    step = rank.groups[0].block_size
    assert length == found.context < found.length
    assert rank.caches_of_one(config, length) <= MIB < rank.caches_of_one(config, length + step)
    assert f"max_model_len is {length} instead of {found.length}" in caplog.text


def test_explain_builds_a_model_once_and_shows_what_was_chosen(small, monkeypatch):
    from modulm.config.sources import keywords

    small(11 * MIB)
    draft = keywords(model="demo", quantization="auto")
    decisions = {each.subject: each for each in decisions_for(draft)}
    assert "rounded while they load" in decisions["quantization"].reason
    small(64 << 30)
    built = []
    real = estimates.build_model
    monkeypatch.setattr(estimates, "build_model", lambda *a, **k: built.append(1) or real(*a, **k))
    monkeypatch.setattr("modulm.loading.model.build_model", None)
    decisions = decisions_for(keywords(model="demo"))
    assert built == [1]
    assert any(each.subject == "memory" and each.winner for each in decisions)


def test_the_memory_of_devices_counts_for_the_budget(monkeypatch):
    """A platform that measures its tensors is asked through the workers, until it says None."""
    llm = LLM("demo", kv_cache_memory_bytes=1 << 20)

    class Engine:
        process_ids = ()
        info = llm.info
        calls = 0

        async def collective_rpc(self, method, timeout):
            self.calls += 1
            return llm.collective_rpc(method, timeout)

    settings = ModelSettings(name="demo", config=llm.info.config)
    model = HostedModel(settings, engine=Engine(), state="loaded")
    model.estimate = Needs(settings.config, 40 * MIB)
    monkeypatch.setattr(CpuPlatform, "reset_peak_memory", lambda self: 48 * MIB)
    asyncio.run(model.measure())
    assert (model.memory, model.reserved, model.beyond_estimate) == (48 * MIB, 48 * MIB, 8 * MIB)
    monkeypatch.undo()
    asyncio.run(model.measure())
    asyncio.run(model.measure())
    assert model.engine.calls == 2
    assert model.memory == llm.info.description.weight_bytes
    llm.shutdown()


def test_a_server_of_one_model_counts_memory_beyond_its_estimate(monkeypatch):
    """Workers say once what they were to hold; models without an estimate have no count."""
    llm = LLM("demo", kv_cache_memory_bytes=1 << 20)
    (rank,) = estimate(llm.info.config, manager.current()).ranks
    expected = rank.fixed + rank.step + rank.cache_bytes + 100 * MIB

    class Engine:
        process_ids = (os.getpid(),)

        async def collective_rpc(self, method, timeout):
            return llm.collective_rpc(method, timeout)

    def measured(held):
        usage._EXPECTED.clear()
        monkeypatch.setattr(memory_metrics, "measure_each", lambda ids: {ids[0]: held, 0: 5 * MIB})
        memory = EngineMemory("demo", Engine())
        asyncio.run(memory.measure())  # begins to estimate
        assert [metric.name for metric in memory.collect()] == ["modulm:model_memory_bytes"]
        for thread in threading.enumerate():
            if thread.name == "memory-estimate":
                thread.join()
        asyncio.run(memory.measure())
        samples = [sample for metric in memory.collect() for sample in metric.samples]
        assert all(sample.labels == {"model_name": "demo"} for sample in samples)
        return {sample.name: sample.value for sample in samples}

    monkeypatch.setattr(usage, "_before_loading", 100 * MIB)
    memory, beyond = "modulm:model_memory_bytes", "modulm:model_memory_beyond_estimate_bytes"
    assert measured(expected + 8 * MIB) == {memory: expected + 13 * MIB, beyond: 8 * MIB}
    assert measured(expected - 1) == {memory: expected - 1 + 5 * MIB, beyond: 0}
    monkeypatch.setattr(estimates, "resolve_checkpoint", refuse)
    assert measured(expected).keys() == {memory}
    llm.shutdown()


def refuse(*args):
    raise CheckpointError("unknown")


def test_a_model_of_the_pool_is_estimated_within_its_budget(monkeypatch):
    """Its caches get a quarter; one whose caches have a size keeps it."""
    # This process, which has run other tests, is larger than a server.
    monkeypatch.setattr("modulm_server.models.memory.measure", lambda *_, **__: 100 * MIB)
    plugins, folder = (
        manager.current(),
        open_checkpoint(EngineConfig.from_keywords(), manager.current()).path,
    )
    config = EngineConfig.from_keywords(max_num_seqs=256)
    alone = needs_of(config, plugins, folder, None)
    assert alone.config == config
    budget = 1200 * MIB
    shared = needs_of(config, plugins, folder, budget)
    assert shared.config.cache.kv_cache_memory_bytes == budget // 4
    assert shared.bytes < alone.bytes
    sized = config.with_parts({"kv_cache_memory_bytes": 32 * MIB})
    assert needs_of(sized, plugins, folder, budget).config == sized
    pair = sized.with_parts({"data_parallel_size": 2})
    assert (
        needs_of(pair, plugins, folder, None).bytes
        == 2 * needs_of(sized, plugins, folder, None).bytes
    )
    little = needs_of(EngineConfig.from_keywords(quantization="auto"), plugins, folder, 112 * MIB)
    assert little.config.scheduler.max_num_seqs < CpuPlatform.sequences[0]
    assert little.config.model.quantization in ("int8", "fp8", "int4")
    assert little.bytes <= 112 * MIB
    changes = changes_within(config.with_parts({"max_num_seqs": 1}), plugins, 112 * MIB)
    assert any("--quantization " in change for change in changes)
    assert changes_within(sized, plugins, 135 * MIB)[0].startswith("--kv-cache-memory-bytes ")
    wrong = config.with_parts({"quantization": "gptq"})
    assert changes_within(wrong, plugins, budget) == []
    guess = needs_of(wrong, plugins, folder, budget)
    assert not guess.estimated
    assert stored_bytes(folder) < guess.bytes < alone.bytes
