"""Routers: in fp32 where the published models compute them so, whatever the model's dtype."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from samples import parametrize_sample

from modulm.nn.linear import Router
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session

#: As in transformers' modelling code; what it multiplies in the model's dtype is not here.
WIDE = {
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "ExaoneMoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "KimiLinearForCausalLM",
}
NARROW = {
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "JambaForCausalLM",
    "Lfm2MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
}


def routers(folder):
    model = Session(folder, device="cpu", dtype="bfloat16").model
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


@parametrize_sample("architecture", sorted(WIDE | NARROW), every=3)
def test_a_router_is_as_wide_as_the_published_one(tmp_path, architecture):
    if not any(d.name == architecture for d in manager.current().names("models")):
        pytest.skip(f"no installed plugin provides {architecture}")
    router_layers = routers(make_tiny(tmp_path, architecture, dtype="bfloat16"))
    assert router_layers
    wanted = torch.float32 if architecture in WIDE else torch.bfloat16
    for router in router_layers.values():
        x = torch.randn(3, router.spec.inputs).bfloat16()
        assert router(x).dtype == wanted


def test_a_wide_router_multiplies_without_rounding(tmp_path):
    folder = make_tiny(tmp_path, "Glm4MoeForCausalLM", dtype="bfloat16")
    name, router = next(iter(routers(folder).items()))
    index = name.split(".")[1]
    stored = load_file(folder / "model.safetensors")[f"model.layers.{index}.mlp.gate.weight"]
    x = torch.randn(5, router.spec.inputs).bfloat16()
    expected = x.float() @ stored.float().T
    torch.testing.assert_close(router(x), expected, atol=1e-5, rtol=1e-5)
