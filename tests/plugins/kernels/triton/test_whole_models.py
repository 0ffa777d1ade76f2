"""Whole models on a device with a queue, with Triton's kernels: as on a CPU with none of them.

Nothing may look at a value on the way; launches are put into the queue as those of a GPU are.
"""

from __future__ import annotations

import pytest
import torch
from samples import parametrize_sample
from torch.utils._python_dispatch import _get_current_dispatch_mode

import modulm
from modulm import SamplingParams
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.testing import queued
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm_quantized import CodedMethod
from modulm_quantized.at_load import AtLoad

PROMPTS = [[5, 99, 7, 300], [*range(20, 54)]]
GREEDY = [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)] * 2
DRAWN = [
    SamplingParams(temperature=0.9, seed=6, max_tokens=4, top_k=20, top_p=0.9, min_p=0.02,
                   logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=5, max_tokens=4, repetition_penalty=1.3, ignore_eos=True),
]  # fmt: skip


class Device(queued.QueuedPlatform):
    """On which kernels are interpreted, one after the other."""

    kernels = ("triton",)
    attention = ("triton", "sdpa")

    @property
    def dtypes(self):
        return ("float32", "float16")


@pytest.fixture
def launches(monkeypatch):
    """Launches between the beginning of a step and its end wait in the queue."""
    from triton.runtime import interpreter

    started: list[str] = []
    run = interpreter.GridExecutor.__call__

    def later(self, *args, **meta):
        started.append(self.fn.__name__)
        if isinstance(_get_current_dispatch_mode(), queued._Later):
            started.append("later")
            queued.QueuedPlatform.work.put(lambda: run(self, *args, **meta))
        else:
            run(self, *args, **meta)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", later)
    return started


def answers(folder, params, device, loras=None, **flags):
    with manager.using(PluginManager()) as plugins:
        plugins.register("platforms", "queued", Device)
        with modulm.LLM(
            str(folder), device=device, num_gpu_blocks_override=40, max_num_batched_tokens=40,
            max_model_len=128, max_num_seqs=4,
            attention_backend="sdpa" if device == "cpu" else "triton",
            **{"dtype": "float32", **flags},
        ) as llm:  # fmt: skip
            requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            outputs = llm.generate(requests, params, use_tqdm=False, lora_request=loras)
    return [list(o.outputs[0].token_ids) for o in outputs]


CASES = {
    "LlamaForCausalLM": {"_argmax", "_rms_norm", "_qkv_prepare", "_prompt", "_split", "_merge"},
    "DeepseekV3ForCausalLM": {"_latent_prepare", "_write_kv", "_prompt", "_split"},
    "Qwen3MoeForCausalLM": {"_experts", "_moe_route", "_place", "_add_up"},
    "Mamba2ForCausalLM": {"_by_segment", "_by_token", "_causal_conv", "_keep_inputs"},
    "Qwen3NextForCausalLM": {"_invert", "_by_segment", "_by_token", "_experts"},
}
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter")


@interpreted
@parametrize_sample("name", CASES, every=8)
def test_greedy_tokens_are_those_of_the_cpu(tmp_path, launches, name):
    folder = make_tiny(tmp_path / "tiny", name)
    expected = answers(folder, GREEDY, "cpu", kernels="none")
    assert answers(folder, GREEDY, "queued", async_scheduling=True) == expected
    assert {*CASES[name], "later"} <= set(launches)


@pytest.mark.exhaustive
@interpreted
def test_drawn_tokens_and_those_of_adapters_are_those_of_the_cpu(tmp_path, launches):
    folder = make_tiny(tmp_path / "tiny")
    modules = {f"model.layers.{i}.self_attn.q_proj": (64, 64) for i in range(2)}
    write_lora(tmp_path / "a", modules, 4, 1)
    loras = [None, modulm.LoRARequest("a", 1, tmp_path / "a")]
    flags = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    expected = answers(folder, DRAWN, "cpu", loras, kernels="none", **flags)
    assert answers(folder, DRAWN, "queued", loras, **flags) == expected
    assert answers(folder, DRAWN, "cpu", kernels="none") != expected
    assert {"_sample", "_measure", "_penalise", "_down", "_up", "later"} <= set(launches)


@pytest.mark.exhaustive
@interpreted
@parametrize_sample("name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"], every=2)
def test_quantized_layers_and_experts_are_multiplied_as_codes(tmp_path, launches, name):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
    folder = make_tiny(tmp_path / "tiny", name, **sizes)
    flags = {"quantization": "int4", "dtype": "float16", "async_scheduling": True}
    expected = answers(folder, GREEDY, "cpu", **{**flags, "kernels": "none"})
    assert answers(folder, GREEDY, "queued", **flags) == expected
    assert {"_linear", "later"} | ({"_experts"} if "Moe" in name else set()) <= set(launches)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [
        ("Qwen3ForCausalLM", "ptpc_fp8"),
        ("Qwen3ForCausalLM", "mxfp8"),
        ("Qwen3MoeForCausalLM", "ptpc_fp8"),
    ],
)
def test_norms_quantize_the_inputs_of_the_layers_after_them(
    tmp_path, launches, monkeypatch, architecture, quantization
):
    """The same tokens as with a kernel of its own, which only ends of branches need then."""
    folder = make_tiny(tmp_path / "tiny", architecture)
    flags = {
        "quantization": quantization, "activation_quantization": "on", "dtype": "float16",
    }  # fmt: skip
    blocks = quantization == "mxfp8"
    if blocks:  # as a checkpoint in this format; what is rounded at load keeps its inputs
        monkeypatch.setattr(AtLoad, "activations", CodedMethod.activations)
    norm, own = ("_rms_norm_blocks", "_round_blocks") if blocks else ("_rms_norm_rounded", "_round")
    fused = answers(folder, GREEDY, "queued", **flags)
    count = launches.count(own)
    assert norm in launches
    launches.clear()
    monkeypatch.setattr("modulm_quantized.norms.fuses", lambda ops: False)
    assert answers(folder, GREEDY, "queued", **flags) == fused
    assert norm not in launches
    assert 0 < count < launches.count(own)
