"""config.json is refused with file and key where it makes no sense, before anything is made."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import ClassVar

import pytest

from modulm.errors import CheckpointError
from modulm.nn import read_config
from modulm_layers import DecoderConfig

GOOD = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_null_is_the_default_and_unknown_keys_are_left_unread():
    config = read_config({**GOOD, "num_key_value_heads": None, "use_cache": True}, DecoderConfig)
    assert (config.kv_heads, config.head_size) == (4, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": 10**15}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"intermediate_size": 10**12}, "intermediate_size"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"vocab_size": None}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: inf"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps: -1e-06"),
        ({"rms_norm_eps": 1e40}, "rms_norm_eps"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"sliding_window": 10**15}, "sliding_window"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": -10000.0}, "rope_theta"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor: 3 of 16"),
        ({"num_attention_heads": 64}, "head_dim"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_parameters.rope_theta: nan"),
        ({"rope_scaling": {"short_factor": [1.0, float("nan")]}}, "short_factor: NaN"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor: 0 must be above zero"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": -1}},
            "original_max_position_embeddings",
        ),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    ],
)
def test_nonsense_is_refused_with_file_and_key(change, message):
    with pytest.raises(CheckpointError, match=rf"here/config\.json: .*{message}"):
        read_config({**GOOD, **change}, DecoderConfig, "here/config.json")


SAID = {
    "tiny_a": {
        "defaults": {"head_dim": 128, "mlp_bias": True, "sliding_window": 8, "n_layer": 7},
        "unknown": ["layer_types", "num_hidden_layers"],
    }
}


class Aliased(DecoderConfig):
    ALIASES: ClassVar[Mapping[str, str]] = {"n_layer": "num_hidden_layers"}


@pytest.fixture
def type_defaults(monkeypatch):
    monkeypatch.setattr("modulm.nn.config.model_keys", lambda package: SAID)


def test_a_key_left_out_is_what_its_model_type_has(type_defaults):
    known = read_config({**GOOD, "model_type": "tiny_a"}, Aliased)
    other = read_config({**GOOD, "model_type": "tiny_b"}, Aliased)
    assert (known.head_dim, known.mlp_bias, known.sliding_window) == (128, True, 8)
    assert (other.head_dim, other.mlp_bias, other.sliding_window) == (None, False, None)


def test_what_the_file_says_comes_first_null_too(type_defaults):
    table = {**GOOD, "model_type": "tiny_a", "head_dim": None, "mlp_bias": None}
    config = read_config({**table, "sliding_window": 5}, Aliased)
    assert (config.head_dim, config.mlp_bias, config.sliding_window) == (None, False, 5)


def test_keys_that_a_model_type_does_not_know_mean_nothing_and_aliases_are_followed(type_defaults):
    table = {**GOOD, "model_type": "tiny_a", "layer_types": ["sliding_attention"] * 2}
    assert read_config(table, Aliased).num_hidden_layers == 7
    assert read_config({**table, "n_layer": 3}, Aliased).num_hidden_layers == 3
    assert read_config(table, Aliased).layer_types is None


def test_a_problem_is_told_by_the_file_s_own_name_of_the_key():
    table = {key: value for key, value in GOOD.items() if key != "num_hidden_layers"}
    with pytest.raises(CheckpointError, match=r"n_layer: 1000000 is not a plausible number"):
        read_config({**table, "n_layer": 10**6}, Aliased)


def test_a_class_of_a_script_has_no_file_beside_it(monkeypatch):
    script = type(Aliased.__name__, (Aliased,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert read_config({**GOOD, "model_type": "tiny_a"}, script).head_size == 16
