"""config.json of the families: spellings that mean the same, and errors that name the key."""

from __future__ import annotations

import pytest

from modulm.errors import CheckpointError
from modulm.nn import read_config
from modulm.plugins import manager


def read(architecture, **changes):
    driver = manager.current().load("models", architecture)
    return read_config({**driver.tiny(), **changes}, driver.config_type)


WRONG = {
    "bamba-layer": ("BambaForCausalLM", {"attn_layer_indices": [3]}, "attn_layer_indices"),
    "bamba-groups": ("BambaForCausalLM", {"mamba_n_groups": 3}, "mamba_n_groups"),
    "codegen-heads": ("CodeGenForCausalLM", {"n_head": 2}, "n_head"),
    "dots-groups": ("Dots1ForCausalLM", {"n_group": 4}, "n_group"),
    "ernie-experts": ("Ernie4_5_MoeForCausalLM", {"moe_k": 9}, "moe_k"),
    "exaone-letters": (
        "Exaone4ForCausalLM",
        {"sliding_window_pattern": "LXG"},
        "sliding_window_pattern",
    ),
    "glm-groups": ("Glm4MoeForCausalLM", {"topk_group": 5}, "topk_group"),
    "gptj-rotation": ("GPTJForCausalLM", {"rotary_dim": 18}, "rotary_dim"),
    "gpt-neo-layers": (
        "GPTNeoForCausalLM",
        {"attention_types": [[["global"], 2]]},
        "attention_types",
    ),
    "gpt-neo-kind": (
        "GPTNeoForCausalLM",
        {"attention_types": [[["global", "near"], 2]]},
        "attention_types",
    ),
    "hunyuan-alpha": (
        "HunYuanDenseV1ForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": "much"}},
        "alpha",
    ),
    "hunyuan-experts": ("HunYuanMoEV1ForCausalLM", {"moe_topk": [2, 2]}, "moe_topk"),
    "lfm2-kind": ("Lfm2ForCausalLM", {"layer_types": ["conv", "scan", "conv"]}, "layer_types"),
    "minimax-scores": ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, "scoring_func"),
    "mpt-attention": ("MptForCausalLM", {"attn_config": {"alibi": False}}, "attn_config.alibi"),
    "mpt-scale": (
        "MptForCausalLM",
        {"attn_config": {"softmax_scale": "small"}},
        "attn_config.softmax_scale",
    ),
    "nemotron-h-experts": (
        "NemotronHForCausalLM",
        {"num_experts_per_tok": 5},
        "num_experts_per_tok",
    ),
    "nemotron-h-nothing": (
        "NemotronHForCausalLM",
        {"layers_block_type": None},
        "layers_block_type",
    ),
    "olmoe-bounds": ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv"),
    "smollm3-layers": ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers"),
    "xglm-encoder": ("XGLMForCausalLM", {"add_cross_attention": True}, "add_cross_attention"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_named(name):
    architecture, changes, key = WRONG[name]
    read(architecture)
    with pytest.raises(CheckpointError, match=key):
        read(architecture, **changes)


def test_letters_name_layers_as_words_do():
    words = read("NemotronHForCausalLM")
    letters = read(
        "NemotronHForCausalLM",
        layers_block_type=None,
        num_hidden_layers=None,
        hybrid_override_pattern="M-*E",
    )
    assert letters.layer_types == words.layer_types
    assert letters.num_hidden_layers == 4


def test_a_pattern_of_letters_ends_with_a_layer_that_sees_all():
    config = read("Exaone4ForCausalLM", sliding_window_pattern="LG", num_hidden_layers=5)
    assert [config.window(i) for i in range(5)] == [12, None, 12, None, None]


def test_convolutions_where_attention_is_not_named():
    config = read("Lfm2ForCausalLM", layer_types=None, full_attn_idxs=[2])
    assert [config.layer_type(i) for i in range(3)] == ["conv", "conv", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "width"), [({}, 64), ({"block_ff_dim": 180}, 128), ({"block_multiple_of": 1}, 64)]
)
def test_the_width_of_a_feed_forward_part_is_rounded_up(changes, width):
    assert read("Lfm2ForCausalLM", **changes).inner_size == width
