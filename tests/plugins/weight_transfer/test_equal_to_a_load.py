"""After an update, tokens and log probabilities are those of an engine that has loaded the same
checkpoint: families, formats at load, layouts of ranks. Trainers that are killed change nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from modulm import LLM, SamplingParams
from modulm.errors import EngineAsleep, EngineError, RequestError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm_weights_gloo import WeightBroadcaster
from modulm_weights_shared_memory import SharedWeights

FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 64,
    "cpu_threads": 1,
}  # fmt: skip
SHARED = {"weight_transfer_config": {"backend": "shared_memory"}}
PROMPT = {"prompt_token_ids": list(range(5, 45))}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
Answer = tuple[list[int], list[dict[int, float]]]


def answer(llm: LLM) -> Answer:
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    first = output.outputs[0]
    logprobs = [{token: entry.logprob for token, entry in step.items()} for step in first.logprobs]
    return list(first.token_ids), logprobs


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def check(architecture: str, flags: dict[str, Any], folder: Path) -> None:
    """There, back, and there again."""
    old, new = (make_tiny(folder / str(seed), architecture, seed=seed) for seed in (1, 2))
    flags = {**FLAGS, **flags}
    with LLM(str(new), **flags) as llm:
        expected = answer(llm)
    with LLM(str(old), **flags, **SHARED) as llm:
        before = answer(llm)
        llm.init_weight_transfer_engine()
        for source, result in ((new, expected), (old, before), (new, expected)):
            with SharedWeights(tensors_of(source)) as shared:
                llm.start_weight_update()
                llm.update_weights(shared.info)
                llm.finish_weight_update()
            assert answer(llm) == result
    assert before != expected


WRITABLE = frozenset({*vars(transformers), *transformers.__all__})
#: One name of each driver that generates text and whose checkpoints transformers can write.
DECODERS = sorted(
    {
        declared.target: declared.name
        for declared in manager.current().names("models")
        if declared.name.endswith("ForCausalLM") and declared.name in WRITABLE
    }.values()
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", DECODERS)
def test_families(architecture: str, tmp_path: Path) -> None:
    check(architecture, {}, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_formats_at_load(architecture: str, quantization: str, tmp_path: Path) -> None:
    check(architecture, {"dtype": "bfloat16", "quantization": quantization}, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        ("Qwen3ForCausalLM", {"tensor_parallel_size": 2}),
        ("Qwen3ForCausalLM", {"tensor_parallel_size": 2, "quantization": "int4"}),
        ("Qwen3ForCausalLM", {"pipeline_parallel_size": 2}),
        ("Qwen3MoeForCausalLM", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_layouts_of_ranks(architecture: str, flags: dict[str, Any], tmp_path: Path) -> None:
    check(architecture, {"dtype": "bfloat16", **flags}, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_sleep_by_tags_of_two_ranks(ranks: dict[str, Any], tmp_path: Path) -> None:
    """Weights come back alone, are updated, and then the caches come; at both levels."""
    old, new = (make_tiny(tmp_path / str(seed), "Qwen3ForCausalLM", seed=seed) for seed in (1, 2))
    flags = {**FLAGS, **ranks, "enable_sleep_mode": True}
    with LLM(str(new), **flags) as llm:
        expected = answer(llm)
    with LLM(str(old), **flags, **SHARED) as llm:
        before = answer(llm)
        llm.init_weight_transfer_engine()
        for level, source, result in ((1, new, expected), (2, new, expected), (1, old, before)):
            llm.sleep(level)
            with pytest.raises(EngineAsleep):
                answer(llm)
            llm.wake_up(["weights"])
            with SharedWeights(tensors_of(source)) as shared:
                llm.start_weight_update()
                llm.update_weights(shared.info)
                llm.finish_weight_update()
            with pytest.raises(EngineAsleep):
                answer(llm)
            llm.wake_up(["kv_cache"])
            assert answer(llm) == result
    assert before != expected


def share(folder: Path, pipe: Connection) -> None:
    """A trainer that waits after it has sent what it has to send."""
    pipe.send(SharedWeights(tensors_of(folder)).info)
    pipe.recv()


def announce(port: int, pipe: Connection) -> None:
    """A trainer that meets the workers, and sends nothing."""
    sender = WeightBroadcaster("127.0.0.1", port, timeout=300)
    sender.connect()
    pipe.send("connected")
    pipe.recv()


class Killed:
    """A trainer in another process, which can be killed."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=function, args=(*arguments, other), daemon=True)
        self.process.start()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def test_a_trainer_that_is_killed_changes_nothing(tmp_path: Path) -> None:
    old, new = (make_tiny(tmp_path / str(seed), "LlamaForCausalLM", seed=seed) for seed in (1, 2))
    trainer = Killed(share, new)
    info = trainer.pipe.recv()
    half = len(info["names"]) // 2
    part = {**info, **{k: info[k][:half] for k in ("names", "dtype_names", "shapes")}}
    with LLM(str(old), **FLAGS, **SHARED) as llm:
        before = answer(llm)
        llm.init_weight_transfer_engine()
        llm.start_weight_update()
        llm.update_weights(part)
        trainer.kill()
        llm.reset_prefix_cache()
        assert answer(llm) == before
        with pytest.raises(RequestError, match="missing weights"):
            llm.finish_weight_update()
        llm.reset_prefix_cache()
        assert answer(llm) == before
        llm.start_weight_update()
        llm.update_weights(info)  # its memory has outlived it
        llm.finish_weight_update()
        assert answer(llm) != before
        assert not Path("/dev/shm", info["segment"]).exists()  # nobody else would free it
        with SharedWeights(tensors_of(old)) as live:
            llm.init_weight_transfer_engine()
            assert Path("/dev/shm", live.info["segment"]).exists()


def test_a_broadcast_that_never_comes(tmp_path: Path) -> None:
    """The trainer dies after it has announced tensors, before it sends one."""
    folder = make_tiny(tmp_path, "LlamaForCausalLM", seed=1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trainer = Killed(announce, port)
    config = {"backend": "gloo", "timeout": 300}
    with LLM(str(folder), **FLAGS, weight_transfer_config=config) as llm:
        before = answer(llm)
        llm.init_weight_transfer_engine(WeightBroadcaster("127.0.0.1", port, timeout=300).init_info)
        assert trainer.pipe.recv() == "connected"
        trainer.kill()
        llm.start_weight_update()
        with pytest.raises(EngineError, match="the old weights remain in use.*was not received"):
            llm.update_weights(WeightBroadcaster.info(tensors_of(folder)))
        llm.reset_prefix_cache()
        assert answer(llm) == before
