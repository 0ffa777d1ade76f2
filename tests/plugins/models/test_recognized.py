"""What the bridge recognizes of transformers' code, and what it must not take for the same."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.plugins.models.bridged_sizes import SMALL, write

from modulm import LLM, SamplingParams
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_kernels_cpu.replay import Replay
from modulm_transformers.attention import NAME, register_attention
from modulm_transformers.recognized_attention import plain_attention

#: Architecture -> (order of the norms, pairs of rotated dimensions), or None.
ATTENTION = {
    "CohereForCausalLM": ("", False),
    "Gemma3ForCausalLM": ("heads", True),
    "HunYuanDenseV1ForCausalLM": ("last", True),
    "LlamaForCausalLM": ("", True),
    "Olmo2ForCausalLM": ("whole", True),
}
#: What these do besides.
OTHERS = {
    "GptOssForCausalLM": ({}, "sinks"),
    "Ministral3ForCausalLM": ({}, "scales that grow with the position"),
    "OlmoForCausalLM": ({"clip_qkv": 2.0}, "clamps"),
    "Phi3ForCausalLM": ({"pad_token_id": 0}, "one layer for q, k and v"),
}


def attention(name, **more):
    """The attention module of a first layer, without memory."""
    register_attention()
    kind = getattr(transformers, name)
    sizes = {**SMALL, "head_dim": 16, "layer_types": ["full_attention"], **more}
    config = kind.config_class(**{**sizes, "num_hidden_layers": 1})
    config = config.get_text_config()
    with torch.device("meta"):
        model = kind._from_config(config, attn_implementation=NAME).eval()
    return model.model.layers[0].self_attn


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_that_ours_can_run(name):
    found = plain_attention(attention(name), {16})
    assert (found.order, found.neox) == ATTENTION[name]
    assert (found.head_dim, found.value_dim, found.returned) == (16, 16, 2)


@pytest.mark.parametrize("name", OTHERS)
def test_attention_that_does_more_is_left_alone(name):
    assert plain_attention(attention(name, **OTHERS[name][0]), {16}) is None


def test_the_same_module_without_what_it_did_besides():
    assert plain_attention(attention("OlmoForCausalLM"), {16}) is not None


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("Qwen3ForCausalLM", True),
        ("SmolLM3ForCausalLM", True),  # some layers do not rotate
        ("MixtralForCausalLM", True),
        ("Gemma2ForCausalLM", False),  # norms behind the parts
        ("CohereForCausalLM", False),  # both parts read the same
        ("GraniteForCausalLM", False),  # parts are scaled
    ],
)
def test_decoders_without_the_librarys_code(name, whole, tmp_path):
    model = Session(write(tmp_path, name), model_impl="transformers", device="cpu").model
    assert (model.decoder is not None) == whole


@pytest.mark.exhaustive
def test_angles_that_depend_on_the_length_are_computed_in_each_step(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = make_tiny(tmp_path, "LlamaForCausalLM", rope_parameters=rope)
    assert Session(folder, model_impl="transformers", device="cpu").model.decoder is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_steps_are_replayed_and_give_the_native_models_tokens(quantization, tmp_path, monkeypatch):
    made, create = [], Replay.__init__
    monkeypatch.setattr(Replay, "__init__", lambda self, *a: made.append(self) or create(self, *a))
    folder = make_tiny(tmp_path, "Qwen3ForCausalLM", hidden_size=128, intermediate_size=256)
    flags = {"dtype": "bfloat16", "max_model_len": 64, "num_gpu_blocks_override": 64,
             "quantization": quantization, "use_tqdm_on_load": False}  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = []
    for name in ("transformers", "modulm"):
        with LLM(str(folder), model_impl=name, **flags) as llm:
            (output,) = llm.generate([{"prompt_token_ids": [5, 9, 40]}], params, use_tqdm=False)
        tokens.append(output.outputs[0].token_ids)
        assert made[-1].reason is None
        assert made[-1]._programs
    assert tokens[0] == tokens[1]
