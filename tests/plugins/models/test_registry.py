"""Names of vLLM's registry: each is on the page of models, served or refused with a reason.

`tools/reference.py` writes the page and fails if it cannot tell (`tests/unit/docs`).
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path

import pytest

from modulm.errors import UnsupportedError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm.plugins.defaults import choose_model
from modulm.testing.checkpoints import make_tiny
from modulm.testing.models import check_equals_transformers
from modulm_transformers.unsupported import reasons

ROOT = Path(__file__).resolve().parents[3]
#: Served without an entry of their own: by conversion, or by reading their pooling files.
CONVERTED = {
    "BartModel", "Gemma2Model", "HF_ColBERT", "JambaForSequenceClassification", "LlamaModel",
    "MistralModel", "Qwen2ForProcessRewardModel", "Qwen2ForRewardModel", "Qwen2Model",
}  # fmt: skip


def test_every_architecture_is_on_the_page():
    file = ROOT / "tools/vllm_architectures.toml"
    sections = tomllib.loads(file.read_text(encoding="utf-8"))
    names = {name for names in sections.values() for name in names}
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert len(names) > 450
    assert names - set(re.findall(r"`(\w+)`", page)) <= CONVERTED


def test_what_is_refused_says_why():
    plugins = manager.current()
    installed = {declared.name for declared in plugins.names("models")}
    assert not installed & set(reasons()), "remove what packages have from unsupported.toml"
    table = {"architectures": ["EagleLlamaForCausalLM"]}
    driver = choose_model(plugins, table["architectures"], table).driver
    with pytest.raises(UnsupportedError, match=r'EagleLlamaForCausalLM: .* method "eagle"'):
        driver.config_type.from_table(table, "config.json")


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
}  # fmt: skip
RW = {
    "hidden_size": 32,
    "vocab_size": 64,
    "layer_norm_epsilon": 1e-5,
    "alibi": False,
    "bias": False,
}
#: Names of the first files of a model -> (their config.json, how later ones say the same).
OLDER = {
    "RWForCausalLM": (
        {**RW, "model_type": "RefinedWebModel", "n_head": 4, "n_layer": 2, "multi_query": True},
        {"num_attention_heads": 4, "num_hidden_layers": 2, "kv_heads": 1, "two_norms": False},
    ),
    "RWForCausalLM 40B": (
        {**RW, "model_type": "RefinedWeb", "n_head": 8, "n_head_kv": 2, "n_layer": 2},
        {"kv_heads": 2, "two_norms": True},
    ),
    "StableLMEpochForCausalLM": (
        {**SIZES, "model_type": "stablelm_epoch", "norm_eps": 1e-3, "rope_pct": 0.5},
        {"layer_norm_eps": 1e-3, "partial_rotary_factor": 0.5},
    ),
    "LLaMAForCausalLM": (
        {**SIZES, "model_type": "llama", "max_sequence_length": 2048, "pad_token_id": -1},
        {"max_position_embeddings": 2048},
    ),
    "InternLMForCausalLM": (
        {**SIZES, "model_type": "internlm", "bias": True, "rotary": {"base": 10000}},
        {"attention_bias": True, "mlp_bias": False},
    ),
    "InternLM3ForCausalLM": (
        {**SIZES, "model_type": "internlm3", "bias": False, "qkv_bias": True},
        {"attention_bias": True, "mlp_bias": False},
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_first_files_mean_what_later_ones_say(name):
    table, meant = OLDER[name]
    driver = manager.current().load("models", name.partition(" ")[0])
    config = read_config(table, driver.config_type)
    assert {key: getattr(config, key) for key in meant} == meant


@pytest.mark.parametrize(
    ("name", "model_type", "changes"),
    [
        ("InternLM3ForCausalLM", "internlm3", {"attention_bias": True, "mlp_bias": True}),
        ("IQuestCoderForCausalLM", "iquestcoder", {}),
    ],
)
def test_llama_by_another_name_is_llama_in_transformers(name, model_type, changes, tmp_path):
    folder = make_tiny(tmp_path, "LlamaForCausalLM", **changes)
    file = folder / "config.json"
    table = json.loads(file.read_text(encoding="utf-8"))
    table |= {"architectures": [name], "model_type": model_type}
    file.write_text(json.dumps(table), encoding="utf-8")
    check_equals_transformers(folder, steps=8, device="cpu", attention_backend="sdpa")


def test_the_yarn_of_telechat_3_grows_by_its_own_factor():
    driver = manager.current().load("models", "TeleChat3ForCausalLM")
    yarn = {"factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 1e6}
    table = {**SIZES, "model_type": "telechat3", "max_position_embeddings": 256}
    scaled = {**table, "rope_scaling": {"type": "telechat3-yarn", **yarn}}
    rope = read_config(scaled, driver.config_type).rope()
    usual = read_config({**table, "rope_scaling": {"type": "yarn", **yarn}}, driver.config_type)
    assert rope.attention_factor == pytest.approx(1 + 0.07 * math.log(8))
    assert usual.rope().attention_factor == pytest.approx(1 + 0.1 * math.log(8))
    assert (rope.kind, rope.factor, rope.original) == ("yarn", 8.0, 32)
