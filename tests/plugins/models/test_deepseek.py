"""Latent attention and grouped experts: what the tiny checkpoints of the kit leave alone."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import parametrize_sample

from modulm.errors import CheckpointError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.models import check_equals_transformers, check_steps
from modulm.testing.session import Session

FLAGS = {"attention_backend": "sdpa", "device": "cpu", "dtype": "float32"}
SMALL = {"num_hidden_layers": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
VARIANTS = {
    "v2-lite": (
        "DeepseekV2ForCausalLM",
        {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "v2-yarn": ("DeepseekV2ForCausalLM", {"rope_parameters": YARN}),
    "v2-biases": ("DeepseekV2ForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "v3-weights-as-they-are": ("DeepseekV3ForCausalLM", {"norm_topk_prob": False}),
    "v3-halves-rotated": ("DeepseekV3ForCausalLM", {"rope_interleave": False}),
    "v3-one-group": ("DeepseekV3ForCausalLM", {"n_group": 1, "topk_group": 1}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_transformers(name, tmp_path):
    architecture, settings = VARIANTS[name]
    folder = make_tiny(tmp_path, architecture, **SMALL, **settings)
    check_equals_transformers(folder, steps=12, **FLAGS)


def test_learned_bias_moves_the_choice_but_not_the_weights(tmp_path):
    folder = make_tiny(tmp_path, "DeepseekV3ForCausalLM", **SMALL)
    prompt = list(range(40, 70))
    before = Session(folder, **FLAGS).step({0: prompt})[0]
    _add(folder, _biases(folder))
    after = Session(folder, **FLAGS).step({0: prompt})[0]
    assert (before - after).abs().max() > 0.1
    check_equals_transformers(folder, steps=12, **FLAGS)


def test_drafting_layers_are_not_read(tmp_path):
    folder = make_tiny(tmp_path, "DeepseekV3ForCausalLM", **SMALL)
    before = Session(folder, **FLAGS).step({0: [5, 6, 7]})[0]
    _add(folder, {"model.layers.2.eh_proj.weight": torch.zeros(64, 128)})
    assert torch.equal(Session(folder, **FLAGS).step({0: [5, 6, 7]})[0], before)
    _add(folder, {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)})
    with pytest.raises(CheckpointError, match=r"layers\.3\.eh_proj"):
        Session(folder, **FLAGS)


def test_a_token_takes_one_compressed_vector_per_layer(tmp_path):
    folder = make_tiny(tmp_path, "DeepseekV3ForCausalLM", kv_lora_rank=48, qk_rope_head_dim=16)
    session = Session(folder, **FLAGS)
    (group,) = session.loaded.groups
    assert group.block_bytes == group.block_size * len(group.layers) * (48 + 16) * 4
    assert len(group.layers) == 3
    layout = group.backend.layout(7)
    assert layout.shape == (7, group.block_size, 1, 48 + 16)
    assert torch.zeros(layout.shape).nbytes == 7 * layout.block_bytes


def test_maps_are_kept_once(tmp_path):
    folder = make_tiny(tmp_path, "DeepseekV2ForCausalLM", **SMALL)
    attention = Session(folder, **FLAGS).model.layers[0].attn
    assert attention.up_k.shape == (4, 24, 32)
    assert attention.up_v.shape == (4, 32, 20)
    assert not [name for name, _ in attention.named_parameters() if "kv_b" in name]
    stored = load_file(folder / "model.safetensors")["model.layers.0.self_attn.kv_b_proj.weight"]
    again = torch.cat([attention.up_k, attention.up_v.transpose(1, 2)], dim=1)
    assert torch.equal(again.flatten(0, 1), stored)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("DeepseekV2ForCausalLM", "topk_method", "noaux_tc"),
        ("DeepseekV3ForCausalLM", "scoring_func", "softmax"),
        ("DeepseekV3ForCausalLM", "n_group", 3),
        ("DeepseekV3ForCausalLM", "topk_group", 5),
        ("DeepseekV3ForCausalLM", "num_experts_per_tok", 5),
    ],
)
def test_routing_that_cannot_be_is_named(architecture, key, value):
    from modulm.nn import read_config
    from modulm.plugins import manager

    driver = manager.current().load("models", architecture)
    with pytest.raises(CheckpointError, match=key):
        read_config({**driver.tiny(), key: value}, driver.config_type)


def _biases(folder):
    generator = torch.Generator().manual_seed(3)
    stored = load_file(folder / "model.safetensors")
    names = [name for name in stored if name.endswith("e_score_correction_bias")]
    assert names
    return {name: torch.rand(stored[name].shape, generator=generator) for name in names}


def _add(folder, tensors):
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def _first_of_equals(scores, k, dim=-1):
    """Like `Tensor.topk`, which promises nothing about equal values."""
    values, indices = scores.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values[..., :k], indices[..., :k]))


@parametrize_sample("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"], every=2)
def test_of_equal_index_scores_the_earlier_tokens_count(architecture, tmp_path, monkeypatch):
    """Two rectified heads often score zero; chunks must not change what is picked then."""
    folder = make_tiny(tmp_path, architecture, index_n_heads=2)
    check_steps(folder, **FLAGS)
    monkeypatch.setattr(torch.Tensor, "topk", _first_of_equals)
    check_equals_transformers(folder, steps=12, **FLAGS)
