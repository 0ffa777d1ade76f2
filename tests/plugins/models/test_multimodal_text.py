"""Text models inside checkpoints for images and sound: the same as transformers has for text."""

from __future__ import annotations

import pytest
import torch

from modulm.errors import UnsupportedError
from modulm.plugins import explain
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_towers import TextConfig, text_architecture

TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN_VISION = {**VISION, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
#: Architecture: the text model's own keys, the other model's, and what is called natively.
WHOLE = {
    "Gemma4ForConditionalGeneration": (
        {
            "model_type": "gemma4_text",
            "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 8,
        },
        {**VISION, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16},
        "Gemma4ForCausalLM",
    ),
    "Llama4ForConditionalGeneration": (
        {
            "model_type": "llama4_text",
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 12,
        },
        {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        "Llama4ForCausalLM",
    ),
    "Qwen3_5ForConditionalGeneration": (DELTA, QWEN_VISION, "Qwen3_5ForCausalLM"),
}


def write(path, architecture):
    text, other, _ = WHOLE[architecture]
    return make_tiny(
        path,
        architecture,
        text_config={**TEXT, **text},
        vision_config=other,
        hidden_size=64,
        tie_word_embeddings=False,
    )


def reference(folder, architecture, tokens):
    import transformers

    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model.eval()(input_ids=torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.parametrize("architecture", WHOLE)
def test_text_is_answered_as_by_the_whole(architecture, tmp_path):
    folder = write(tmp_path, architecture)
    session = Session(folder, device="cpu", dtype="float32", attention_backend="sdpa")
    decision = next(d for d in session.loaded.decisions if d.subject == "model")
    assert decision.winner == "multimodal_text"
    assert WHOLE[architecture][2] in explain.render([decision])
    tokens = [7 + 11 * i % 490 for i in range(37)]
    found = session.step({0: tokens})[0]
    assert (found - reference(folder, architecture, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["gemma", "mllama_text_model"])
def test_text_models_that_compute_otherwise_are_left_alone(kind):
    table = {"architectures": ["Whole"], "text_config": {"model_type": kind}}
    assert text_architecture(table) is None
    with pytest.raises(UnsupportedError, match="Whole: no plugin provides its text model"):
        TextConfig.from_table(table, "config.json")


def test_files_without_a_table_for_text_are_known():
    assert text_architecture({"model_type": "qwen2_vl"}) == "Qwen2ForCausalLM"
    assert text_architecture({"model_type": "qwen2"}) is None
