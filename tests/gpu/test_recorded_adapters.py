"""Recorded steps with adapters on the test device: the same bits as without recordings."""

from __future__ import annotations

import ctypes
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import parametrize_sample

from modulm import LLM, LoRARequest, SamplingParams
from modulm.contracts.kernels import KernelProvider
from modulm.contracts.platform import Probe
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm_gpu.graphs import GraphRecorder
from modulm_gpu.testing import GatherAttention, GraphPlatform

SHAPES = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32), "mlp.down_proj": (96, 64)}
NAMES = ("a", "b", "c")
PROMPTS = [[5, 99, 7, 300], [17], [8] * 20, [7, 9, 11]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
FLAGS = {
    "num_gpu_blocks_override": 60, "max_num_batched_tokens": 32, "block_size": 16,
    "max_num_seqs": 4, "max_model_len": 80, "dtype": "float32", "device": "graphs",
    "attention_backend": "gather", "cudagraph_capture_sizes": (2, 4, 16, 32),
    "enable_lora": True, "max_loras": 2, "max_lora_rank": 8,
}  # fmt: skip
#: Recordings of sizes 2, 4, 16 and 32, each with and without adapters.
RECORDED = {"PIECEWISE": 8, "FULL": 12, "FULL_DECODE_ONLY": 4, "FULL_AND_PIECEWISE": 12}
#: Which adapter each prompt has, in calls one after the other: more than there are slots.
CALLS = (["a", "a", "b", None], ["c", "b", "b", "a"], [None, "c", None, "c"], [None] * 4)


def floats(address, *shape):
    size = 1
    for length in shape:
        size *= length
    held = (ctypes.c_float * size).from_address(address)
    return torch.frombuffer(held, dtype=torch.float32).view(shape)


LIBRARY = torch.library.Library("modulm_test_adapters", "DEF")
LIBRARY.define(
    "add(Tensor(a!) out, Tensor x, Tensor order, Tensor numbers, Tensor addresses) -> ()"
)


def add(out, x, order, numbers, addresses):
    """As a device's kernel: everything is found through these tensors when it runs."""
    for slot, first, count in numbers.tolist():
        rows = order[first : first + count].long()
        for rank, down, up, start, size in addresses[slot].tolist():
            if rank and count:
                narrow = x[rows] @ floats(down, rank, x.shape[1]).T
                out[rows, start : start + size] += narrow @ floats(up, rank, size)


LIBRARY.impl("add", add, "CPU")


class BlockKernels(KernelProvider):
    """The op of recorded steps, as one operation of the queue."""

    name = "blocks"
    api = 1
    calls: ClassVar[list[int]] = []

    @classmethod
    def probe(cls, platform):
        return Probe(1, "a test")

    def ops(self):
        def add_lora_blocks(out, x, blocks, table):
            self.calls.append(len(x))
            if x.dtype != torch.int64:
                numbers = blocks.order, blocks.numbers, table.addresses
                torch.ops.modulm_test_adapters.add(out, x, *numbers)

        return {"add_lora_blocks": add_lora_blocks}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("recorded-adapters")
    make_tiny(place / "model")
    for seed, name in enumerate((*NAMES, "saved")):
        modules = {
            f"model.layers.{i}.{module}": size
            for i in range(2)
            for module, size in SHAPES.items()
        }  # fmt: skip
        write_lora(place / name, modules, 4 + seed, seed)
    path = place / "saved" / "adapter_model.safetensors"
    weight = {"base_model.model.model.norm.weight": torch.linspace(0.5, 1.5, 64)}
    save_file({**load_file(path), **weight}, path)
    return place


def answers(place, calls=CALLS, **flags):
    plugins = PluginManager()
    plugins.register("platforms", "graphs", GraphPlatform)
    plugins.register("attention", "gather", GatherAttention)
    plugins.register("kernels", "blocks", BlockKernels)
    GraphPlatform.recorder = None
    given = {**FLAGS, "kernels": "blocks", **flags}
    with manager.using(plugins), LLM(str(place / "model"), **given) as llm:
        found = []
        for names in calls:
            loras = [
                None if name is None else LoRARequest(name, ord(name[0]), place / name)
                for name in names
            ]
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=loras)
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    return found


def tokens(found):
    return [[ids for ids, _ in call] for call in found]


@pytest.fixture(scope="module")
def expected(place):
    return tokens(answers(place, enforce_eager=True))


@parametrize_sample(("mode", "ahead"), [(mode, mode[-1] == "E") for mode in RECORDED], every=4)
def test_adapters_change_between_recorded_steps(place, expected, mode, ahead, monkeypatch) -> None:
    """The bits of steps of the same sizes that are not replayed, and the tokens of eager steps."""
    flags = {"cudagraph_mode": mode, "async_scheduling": ahead}
    found = answers(place, **flags)
    recorder = GraphPlatform.recorder
    assert recorder.reasons == {}
    assert recorder.recordings == RECORDED[mode]
    assert recorder.repeated > 12
    assert (recorder.passed > 0) == (mode == "FULL_DECODE_ONLY")
    monkeypatch.setattr(GraphRecorder, "__call__", lambda self, batch: self._forward(batch))
    assert found == answers(place, **flags)
    assert tokens(found) == expected
    assert expected[0][0] != expected[1][0] != expected[3][0]


def test_steps_with_other_changes_are_not_recorded(place) -> None:
    """An adapter with a norm of its own, beside one of pairs, and the pairs alone after it."""
    calls = (["a", "saved", None, "saved"], ["a", "a", None, "b"])
    found = answers(place, calls)
    recorder = GraphPlatform.recorder
    repeated = recorder.repeated
    assert tokens(found) == tokens(answers(place, calls, enforce_eager=True))
    answers(place, calls[1:])
    assert repeated == GraphPlatform.recorder.repeated


def test_without_a_kernel_for_them_steps_with_adapters_are_not_recorded(place) -> None:
    names = ["a", "b", None, "a"]
    assert answers(place, [names], kernels="none")
    recorder = GraphPlatform.recorder
    assert recorder.recordings == 6
    assert recorder.repeated == 0
