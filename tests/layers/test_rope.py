"""Rotary tables equal transformers' for every kind of scaling, in either spelling of the keys."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from modulm.errors import CheckpointError
from modulm.nn import read_config
from modulm_layers import DecoderConfig, cos_sin

BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "beta_fast": 16,
        "beta_slow": 2,
    },
}


def table(config, length):
    return cos_sin(config.rope(), length, length, torch.device("cpu"))


def expected(embedding, positions):
    cos, sin = embedding(torch.zeros(1), torch.tensor([positions]))
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_equals_transformers(kind, spelling):
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(**BASE, rope_parameters={**KINDS[kind], "rope_theta": 5000.0})
    )
    settings = dict(KINDS[kind])
    if spelling == "rope_parameters":
        keys = {"rope_parameters": {**settings, "rope_theta": 5000.0}}
    else:
        keys = {
            "rope_scaling": {"type": settings.pop("rope_type"), **settings},
            "rope_theta": 5000.0,
        }
    ours = table(read_config({**BASE, **keys}, DecoderConfig), 100)
    torch.testing.assert_close(ours, expected(theirs, list(range(100))), atol=2e-5, rtol=1e-5)


def test_dynamic_is_what_decoding_token_by_token_gives():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**BASE, rope_parameters=dict(scaling)))
    ours = table(read_config({**BASE, "rope_parameters": scaling}, DecoderConfig), 200)
    for position in (0, 90, 127, 128, 150, 199):
        at = expected(theirs, [position])[0]
        torch.testing.assert_close(ours[position], at, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [64, 128])
def test_longrope_takes_its_long_factors_beyond_the_trained_length(length):
    factors = {
        "short_factor": [1.0 + i for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    }
    keys = {"rope_scaling": {"type": "longrope", **factors}, "original_max_position_embeddings": 64}
    theirs = Phi3RotaryEmbedding(Phi3Config(**BASE, **keys, pad_token_id=0))
    ours = table(read_config({**BASE, **keys}, DecoderConfig), length)
    positions = list(range(length))
    torch.testing.assert_close(ours, expected(theirs, positions), atol=2e-5, rtol=1e-5)


def test_partial_rotation_turns_part_of_a_head():
    config = read_config({**BASE, "partial_rotary_factor": 0.5}, DecoderConfig)
    assert table(config, 10).shape == (10, 8)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "rope_type: unknown 'spiral'"),
        ({"rope_type": "linear"}, "factor: must be a number for rope_type 'linear'"),
        ({"rope_type": "linear", "factor": "2"}, "factor: must be a number"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "8 numbers each"),
    ],
)
def test_a_bad_table_names_the_key(scaling, message):
    with pytest.raises(CheckpointError, match=message):
        read_config({**BASE, "rope_scaling": scaling}, DecoderConfig)


def test_a_table_per_layer_type():
    keys = {
        "layer_types": ["sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0},
        },
    }
    config = read_config({**BASE, **keys}, DecoderConfig)
    assert config.rope("sliding_attention").theta == 100.0
    assert config.rope("full_attention").kind == "linear"
