"""Settings that change a family's block and that its own tiny checkpoint leaves alone."""

from __future__ import annotations

import pytest
import torch
from samples import parametrize_sample
from transformers import MptForCausalLM

from modulm.testing.checkpoints import make_tiny
from modulm.testing.models import check_equals_transformers
from modulm.testing.session import Session

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
    "stablelm-3b": (
        "StableLmForCausalLM",
        {"use_parallel_residual": False, "qk_layernorm": False, "use_qkv_bias": True},
    ),
    "mpt-scaled": ("MptForCausalLM", {"attn_config": {"softmax_scale": 0.3}}),
    "exaone-no-windows": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "k-exaone-as-published": (
        "ExaoneMoeForCausalLM",
        {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_windows": [12, 12, 0],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "mtp_layer_types": ["full_attention"],
            "swiglu_limits": [0.0, 0.0, 0.0],
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "smollm3-windows": (
        "SmolLM3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 12, "no_rope_layers": [0, 1, 1]},
    ),
    "seed-oss-biases": ("SeedOssForCausalLM", {"attention_out_bias": True, "mlp_bias": True}),
    "arcee-biases": ("ArceeForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "nemotron-biases": ("NemotronForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "nemotron-h-biases": ("NemotronHForCausalLM", {"use_bias": True, "mlp_bias": True}),
    "hunyuan-plain-rope": (
        "HunYuanDenseV1ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "ernie-moe-some-layers": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_shared_experts": 0, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
    ),
    "minimax-whole-heads": ("MiniMaxM2ForCausalLM", {"rotary_dim": None}),
    "persimmon-no-norms": ("PersimmonForCausalLM", {"qk_layernorm": False}),
    "santacoder-many-heads": ("GPTBigCodeForCausalLM", {"multi_query": False}),
    "biogpt-unscaled": ("BioGptForCausalLM", {"scale_embedding": False}),
    "xglm-unscaled": ("XGLMForCausalLM", {"scale_embedding": False}),
    "glm-4.5-air": (
        "Glm4MoeForCausalLM",
        {"use_qk_norm": False, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "granite-moe-unshared": ("GraniteMoeSharedForCausalLM", {"shared_intermediate_size": 0}),
    "falcon-h1-norm-after-gate": (
        "FalconH1ForCausalLM",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "projectors_bias": True,
        },
    ),
    "falcon-h1-norm-before-gate": (
        "FalconH1ForCausalLM",
        {"mamba_rms_norm": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "gemma3n-other-stream": (
        "Gemma3nForCausalLM",
        {"altup_active_idx": 1, "altup_correct_scale": False, "attention_bias": True},
    ),
    "gemma4-dense": (
        "Gemma4ForCausalLM",
        {
            "enable_moe_block": False,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "attention_k_eq_v": False,
        },
    ),
    "jamba-dense": (
        "JambaForCausalLM",
        {"num_experts": 1, "num_experts_per_tok": 1, "mamba_proj_bias": True},
    ),
    "llama4-two-experts": (
        "Llama4ForCausalLM",
        {
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
        },
    ),
    "llama4-one-chunk": (
        "Llama4ForCausalLM",
        {"attention_chunk_size": 300, "interleave_moe_layer_step": 1, "no_rope_layers": None},
    ),
    "nemotron-h-latent-experts": (
        "NemotronHForCausalLM",
        {"moe_latent_size": 24, "mlp_bias": True, "n_group": 1, "topk_group": 1},
    ),
    "olmo-hybrid-no-positions": (
        "OlmoHybridForCausalLM",
        {
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
        },
    ),
    "phimoe-windows": (
        "PhimoeForCausalLM",
        {
            "sliding_window": 12,
            "lm_head_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "gemma2-no-caps": (
        "Gemma2ForCausalLM",
        {
            "query_pre_attn_scalar": 144,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "olmoe-bounds": ("OlmoeForCausalLM", {"clip_qkv": 0.7}),
    "zamba2-adapters": (
        "Zamba2ForCausalLM",
        {
            "num_hidden_layers": 2,
            "layers_block_type": ["linear_attention", "hybrid"],
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": True,
        },
    ),
    "opt-350m": ("OPTForCausalLM", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
}


@parametrize_sample("name", VARIANTS, every=8)
def test_variant_equals_transformers(name, tmp_path):
    architecture, settings = VARIANTS[name]
    folder = make_tiny(tmp_path, architecture, **settings)
    check_equals_transformers(folder, attention_backend="sdpa")


#: transformers' eager code adds alibi to the mask and then to the scores once more; as the models
#: were trained, and with the other implementation, it is added once.
ALIBI = {
    "falcon-rw": {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False, "bias": True},
    "one-kv-head": {"multi_query": True},
}


@pytest.mark.parametrize("name", ALIBI)
def test_falcon_with_alibi_equals_transformers(name, tmp_path):
    settings = {"new_decoder_architecture": False, "alibi": True, **ALIBI[name]}
    folder = make_tiny(tmp_path, "FalconForCausalLM", **settings)
    check_equals_transformers(folder, reference="sdpa", attention_backend="sdpa")


def test_mpt_has_the_width_that_its_file_says(tmp_path):
    """transformers' class has four times the hidden size whatever the file says."""
    folder = make_tiny(tmp_path, "MptForCausalLM")
    model = MptForCausalLM.from_pretrained(folder)
    for block in model.transformer.blocks:
        block.ffn.up_proj.weight.data = block.ffn.up_proj.weight[:96].clone()
        block.ffn.down_proj.weight.data = block.ffn.down_proj.weight[:, :96].clone()
    model.config.expansion_ratio = 2
    model.save_pretrained(folder)
    tokens = [7, 30, 11, 400, 5, 9]
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    session = Session(folder, device="cpu", dtype="float32", attention_backend="sdpa")
    assert torch.allclose(session.step({0: tokens})[0], expected, atol=1e-4)
