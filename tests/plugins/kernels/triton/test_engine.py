"""Whole models on these kernels: the text that plain torch gives."""

from __future__ import annotations

import pytest

import modulm
from modulm.testing.checkpoints import make_tiny

PROMPTS = ["the cat sat on", "a"]
GREEDY = modulm.SamplingParams(max_tokens=4, temperature=0.0)


def generate(folder, device, kernels, attention):
    with modulm.LLM(
        str(folder), device=device.type, dtype="float32", max_model_len=64, enforce_eager=True,
        kernels=kernels, attention_backend=attention, kv_cache_memory_bytes=1 << 20,
    ) as llm:  # fmt: skip
        return [found.outputs[0].token_ids for found in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "DeepseekV3ForCausalLM"])
def test_the_text_is_that_of_plain_torch(architecture, device, tmp_path):
    """Norms of heads, latent attention and experts, from prompts through decodes."""
    folder = make_tiny(tmp_path / "model", architecture)
    expected = generate(folder, device, (), "sdpa")
    assert generate(folder, device, ("triton",), "triton") == expected
