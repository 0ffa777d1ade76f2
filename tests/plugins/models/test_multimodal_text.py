"""Text models inside checkpoints for images and sound: the same as transformers has for text."""

from __future__ import annotations

import pytest
import torch

from modulm.errors import UnsupportedError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.plugins.selection import Selection
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_command_explain import text as explain
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
#: Architecture: the text model's own keys, the other model's, and what is called natively.
WHOLE = {
    "VipLlavaForConditionalGeneration": (
        {"model_type": "llama"},
        {**VISION, "model_type": "clip_vision_model", "num_hidden_layers": 2},
        "LlamaForCausalLM",
    ),
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
    without_bridge = PluginManager(Selection.parse("-modulm-transformers"))
    with manager.using(without_bridge):
        session = Session(folder, device="cpu", dtype="float32", attention_backend="sdpa")
    decision = next(d for d in session.loaded.decisions if d.subject == "model")
    assert decision.winner == "multimodal_text"
    assert WHOLE[architecture][2] in explain.render([decision])
    tokens = [7 + 11 * i % 490 for i in range(37)]
    logits = session.step({0: tokens})[0]
    assert (logits - reference(folder, architecture, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["kosmos_2_text_model", "pix2struct_text_model"])
def test_text_models_that_compute_otherwise_are_left_alone(kind):
    table = {"architectures": ["Whole"], "text_config": {"model_type": kind}}
    assert text_architecture(table) is None
    with pytest.raises(UnsupportedError, match="Whole: no plugin provides its text model"):
        TextConfig.from_table(table, "config.json")


def test_files_without_a_table_for_text_are_known():
    assert text_architecture({"model_type": "qwen2_vl"}) == "Qwen2ForCausalLM"
    assert text_architecture({"model_type": "qwen2"}) is None
