"""Stacks of experts rounded at load: on kernels and without, and a model that is made of them."""

from __future__ import annotations

import pytest
import torch

from modulm import LLM, SamplingParams
from modulm.contracts.quantization import LinearSpec
from modulm.ops import bind, twins
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm_quant_rtn.methods import Int4, Int4Config, Int8

METHODS = {"int8": (Int8, Int8.Config(), 0.02), "int4": (Int4, Int4Config(group_size=32), 0.15)}


def tables():
    """Op tables: the twins', and the kernels' where there are any."""
    try:
        from modulm_kernels_cpu.provider import CpuKernels
    except ImportError:
        return [bind()]
    return [bind(), bind([CpuKernels()], dtype="bfloat16")]


def layer_of(method, spec, weight):
    layer = torch.nn.Module()
    layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    method.finish(layer, spec)
    assert layer.weight is None
    return layer


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ops", tables())
def test_close_to_the_plain_experts(name, ops):
    torch.manual_seed(0)
    kind, config, error = METHODS[name]
    method = kind(config, manager.current().load("platforms", "cpu")(), ops)
    up = LinearSpec("experts.gate_up", 64, (96, 96), False, "bfloat16", "expert", experts=4)
    down = LinearSpec("experts.down", 96, (64,), False, "bfloat16", "expert", experts=4)
    plain = [torch.randn(4, s.outputs, s.inputs).div(8).bfloat16() for s in (up, down)]
    layers = [layer_of(method, s, w) for s, w in zip((up, down), plain, strict=True)]
    x, logits = torch.randn(11, 64).bfloat16(), torch.randn(11, 4)
    weights, ids = twins.moe_route(logits, 2)
    wanted = twins.fused_experts(x, weights, ids, *plain).float()
    actual = ops.fused_experts(x, weights, ids, *map(method.experts, layers)).float()
    assert (actual - wanted).norm() < error * wanted.norm()
    for layer, spec, weight in zip(layers, (up, down), plain, strict=True):
        got = method.dequantize(layer, spec)
        assert got.shape == weight.shape
        assert (got.float() - weight.float()).norm() < error * weight.float().norm()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_model_decodes_as_it_prefills(quantization, tmp_path):
    """A prompt with what was answered gives the same next token as decoding did."""
    folder = make_tiny(tmp_path, "Qwen3MoeForCausalLM", dtype="bfloat16")
    llm = LLM(str(folder), dtype="bfloat16", quantization=quantization, max_model_len=128)
    prompt = list(range(40, 60))

    def answer(tokens, count):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        return list(outputs[0].outputs[0].token_ids)

    whole = answer(prompt, 12)
    assert answer([*prompt, *whole[:6]], 6) == whole[6:]
    assert len(set(whole)) > 2
