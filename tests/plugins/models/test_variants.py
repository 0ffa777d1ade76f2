"""Settings that change a family's block and that its own tiny checkpoint leaves alone."""

from __future__ import annotations

import pytest

from modulm.testing.checkpoints import make_tiny
from modulm.testing.models import check_equals_transformers

VARIANTS = {
    "llama-plain-rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "gemma3-linear-rope": (
        "Gemma3ForCausalLM",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            }
        },
    ),
    "neox-one-after-the-other": ("GPTNeoXForCausalLM", {"use_parallel_residual": False}),
    "falcon-7b": (
        "FalconForCausalLM",
        {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
    ),
    "falcon-sequential": (
        "FalconForCausalLM",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": 4,
            "parallel_attn": False,
            "bias": True,
        },
    ),
    "bloom-normed-stream": (
        "BloomForCausalLM",
        {"apply_residual_connection_post_layernorm": True},
    ),
    "mamba-biases": ("MambaForCausalLM", {"use_bias": True, "use_conv_bias": False}),
    "mamba2-biases": ("Mamba2ForCausalLM", {"use_bias": True, "tie_word_embeddings": True}),
    "granite-hybrid-dense": (
        "GraniteMoeHybridForCausalLM",
        {"num_local_experts": 0, "position_embedding_type": None, "mamba_proj_bias": True},
    ),
    "qwen3-next-biases": ("Qwen3NextForCausalLM", {"attention_bias": True}),
    "opt-350m": ("OPTForCausalLM", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_transformers(name, tmp_path):
    architecture, settings = VARIANTS[name]
    folder = make_tiny(tmp_path, architecture, **settings)
    check_equals_transformers(folder, attention_backend="sdpa")
