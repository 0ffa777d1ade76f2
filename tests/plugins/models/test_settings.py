"""config.json of the families: spellings that mean the same, and errors that name the key."""

from __future__ import annotations

import json

import attrs
import pytest
import transformers
from samples import parametrize_sample

from modulm.errors import CheckpointError
from modulm.nn import read_config
from modulm.nn.config import model_keys
from modulm.plugins import manager


def read(architecture, **changes):
    driver = manager.current().load("models", architecture)
    return read_config({**driver.tiny(), **changes}, driver.config_type)


WRONG = {
    "bamba-layer": ("BambaForCausalLM", {"attn_layer_indices": [3]}, "attn_layer_indices"),
    "bamba-heads": ("BambaForCausalLM", {"mamba_d_head": 8}, "mamba_d_head"),
    "gemma-both-ways": (
        "Gemma2ForCausalLM",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention",
    ),
    "gpt2-encoder": ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention"),
    "granite-hybrid-heads": (
        "GraniteMoeHybridForCausalLM",
        {"mamba_d_head": 8},
        "mamba_d_head",
    ),
    "bamba-groups": ("BambaForCausalLM", {"mamba_n_groups": 3}, "mamba_n_groups"),
    "codegen-heads": ("CodeGenForCausalLM", {"n_head": 2}, "n_head"),
    "dots-groups": ("Dots1ForCausalLM", {"n_group": 4}, "n_group"),
    "ernie-experts": ("Ernie4_5_MoeForCausalLM", {"moe_k": 9}, "moe_k"),
    "exaone-letters": (
        "Exaone4ForCausalLM",
        {"sliding_window_pattern": "LXG"},
        "sliding_window_pattern",
    ),
    "k-exaone-windows": (
        "ExaoneMoeForCausalLM",
        {"sliding_windows": [12, 0, 8]},
        "sliding_windows",
    ),
    "k-exaone-gates": ("ExaoneMoeForCausalLM", {"swiglu_limits": [0, 7.0, 7.0]}, "swiglu_limits"),
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
    "smollm3-layers": ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers"),
    "falcon-h1-multipliers": ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
    "gemma3n-widths": ("Gemma3nForCausalLM", {"intermediate_size": [96, 96]}, "intermediate_size"),
    "gemma3n-stream": ("Gemma3nForCausalLM", {"altup_active_idx": 3}, "altup_active_idx"),
    "gemma4-lenders": ("Gemma4ForCausalLM", {"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
    "gemma4-experts": ("Gemma4ForCausalLM", {"top_k_experts": 7}, "top_k_experts"),
    "glm-flash-layers": (
        "Glm4MoeLiteForCausalLM",
        {"mlp_layer_types": ["dense"]},
        "mlp_layer_types",
    ),
    "jamba-period": ("JambaForCausalLM", {"attn_layer_offset": 3}, "attn_layer_offset"),
    "jamba-rank": ("JambaForCausalLM", {"mamba_dt_rank": 0}, "mamba_dt_rank"),
    "kimi-kinds": (
        "KimiLinearForCausalLM",
        {"layer_types": ["mamba", "full_attention", "full_attention"]},
        "layer_types",
    ),
    "llama4-layers": ("Llama4ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    "llama4-kinds": (
        "Llama4ForCausalLM",
        {"layer_types": ["sliding_attention"] * 4},
        "layer_types",
    ),
    "ministral3-growth": (
        "Ministral3ForCausalLM",
        {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": "much"}},
        "llama_4_scaling_beta",
    ),
    "phimoe-experts": ("PhimoeForCausalLM", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
    "xglm-encoder": ("XGLMForCausalLM", {"add_cross_attention": True}, "add_cross_attention"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_named(name):
    architecture, changes, key = WRONG[name]
    read(architecture)
    with pytest.raises(CheckpointError, match=key):
        read(architecture, **changes)


def test_letters_name_layers_as_words_do():
    spelled_out = read("NemotronHForCausalLM")
    letters = read(
        "NemotronHForCausalLM",
        layers_block_type=None,
        num_hidden_layers=None,
        hybrid_override_pattern="M-*E",
    )
    assert letters.layer_types == spelled_out.layer_types
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


def test_full_layers_of_gemma4_have_their_own_heads_in_both_spellings():
    one = read("Gemma4ForCausalLM")
    table = {"1": {"head_dim": 32, "num_key_value_heads": 1}}
    other = read(
        "Gemma4ForCausalLM", global_head_dim=None, per_layer_config={**table, "3": table["1"]}
    )
    assert [one.heads_of(i) for i in range(4)] == [(2, 16), (1, 32)] * 2
    assert [one.heads_of(i) for i in range(4)] == [other.heads_of(i) for i in range(4)]


def test_kimi_counts_layers_from_one_in_its_own_table():
    config = read(
        "KimiLinearForCausalLM",
        layer_types=None,
        linear_attn_config={
            "full_attn_layers": [2],
            "kda_layers": [1, 3],
            "num_heads": 2,
            "head_dim": 24,
            "short_conv_kernel_size": 3,
        },
    )
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    assert [config.layer_type(i) for i in range(3)] == kinds
    assert config.delta == (2, 24, 3)


def test_qwen3_5_attends_in_every_fourth_layer():
    config = read("Qwen3_5ForCausalLM", layer_types=None, num_hidden_layers=8)
    assert [i for i in range(8) if not config.recurrent(i)] == [3, 7]


def test_phi_moe_multiplies_by_what_the_length_asks_for():
    config = read("PhimoeForCausalLM")
    assert config.rope_for(256).attention_factor == 1.2
    assert config.rope_for(257).attention_factor == 1.4


APART = {d.name for kind in ("media_families", "speakers") for d in manager.current().names(kind)}
#: Asked by name: `hasattr` would import each model's module in every process that collects tests.
PUBLIC = frozenset({*vars(transformers), *transformers.__all__})
NAMES = [
    d.name for d in manager.current().names("models") if d.name in PUBLIC and d.name not in APART
]
#: Numbers that may be as large as one likes: nothing is made of that size.
BOUNDS = ("window", "chunk", "length", "positions", "position_embeddings", "scale", "rank", "id")


@parametrize_sample("architecture", NAMES, every=6)
def test_nonsense_in_any_number_names_its_key(architecture):
    """NaN and words in every number, and sizes below zero or beyond all bounds."""
    driver = manager.current().load("models", architecture)
    table = json.loads(json.dumps(driver.tiny()))
    aliases = getattr(driver.config_type, "ALIASES", {})
    whole = read_config(table, driver.config_type)
    tried = 0
    for field in attrs.fields(driver.config_type):
        value = getattr(whole, field.name)
        if type(value) not in (int, float):
            continue
        written = [alias for alias, common in aliases.items() if common == field.name]
        spelt = next((alias for alias in [*written, field.name] if alias in table), field.name)
        known = model_keys(driver.__module__.partition(".")[0]).get(table["model_type"], {})
        if spelt in known.get("unknown", ()):
            continue
        wrong = [float("nan"), "word", [1], -5]
        wrong += [] if field.name.endswith(BOUNDS) else [1e40, 2**62]
        for nonsense in wrong:
            with pytest.raises(CheckpointError, match=rf"{field.name}|{spelt}"):
                read_config({**table, spelt: nonsense}, driver.config_type)
        tried += 1
    assert tried > 3
