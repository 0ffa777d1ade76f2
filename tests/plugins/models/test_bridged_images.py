"""What transformers has as image-text-to-text and no package here: through the bridge, its own
embeddings in front of its own decoder on our memory, against transformers.
"""

from __future__ import annotations

import pytest
import transformers as hf
from samples import parametrize_sample
from tests.plugins.models.test_images import GLM, GLM_SEEN, QWEN, clip, glm, pil, qwen

import modulm
from modulm.errors import UnsupportedError
from modulm_towers import tiny_text
from modulm_towers.testing import ImageFamily, check_images, images, write_family
from modulm_transformers.config import TransformersConfig
from modulm_transformers.image_model import TransformersWithImages

PATCHES = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": 64,
}  # fmt: skip
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
ROUND_TOKENS = {
    "image_token": "<image>",
    "image_boundary_token": "<fake_token_around_image>",
    "end_of_utterance_token": "<end_of_utterance>",
}


def idefics(tokenizer):
    image = pil("idefics2", "Idefics2ImageProcessorPil", do_image_splitting=False,
                size={"longest_edge": 56, "shortest_edge": 28})  # fmt: skip
    return hf.Idefics2Processor(image, tokenizer, image_seq_len=4)


def family(architecture, tokens, processor, table, media=("image",), **more):
    """A family whose checkpoint has this config.json; no driver here is called like it."""
    kinds = media

    class Driver(TransformersWithImages):
        media = kinds

        @classmethod
        def tiny(cls):
            return {"architectures": [architecture]}

    return ImageFamily(Driver, tokens, processor, changes=table, **more)


def rope_text(model_type):
    """A text model with positions on three axes, of heads of 16."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}
    return {**tiny_text(), "model_type": model_type,
            "rope_parameters": {**rope, "partial_rotary_factor": 1.0}}  # fmt: skip


FAMILIES = [
    family("VipLlavaForConditionalGeneration", {"image_token": "<image>"}, clip, {
        "image_token_index": 480, "vision_feature_layers": [-2, -3], "text_config": tiny_text(),
        "vision_config": {**VIT, "model_type": "clip_vision_model", "image_size": 28,
                          "patch_size": 7},
    }),
    family("Exaone4_5_ForConditionalGeneration", QWEN, qwen("Exaone4_5_Processor"), {
        "image_token_id": 480, "video_token_id": 481, "text_config": tiny_text("exaone4"),
        "vision_config": {**PATCHES, "window_size": 16, "fullatt_block_indexes": [1],
                          "num_key_value_heads": 1},
    }, media=("image", "video")),
    family("GlmOcrForConditionalGeneration", GLM, glm("glm46v"), {
        "image_token_id": 480, "video_token_id": 481, "image_start_token_id": 482,
        "image_end_token_id": 483, "video_start_token_id": 484, "video_end_token_id": 485,
        "text_config": rope_text("glm_ocr_text"), "vision_config": {**PATCHES, "image_size": 40},
    }, media=("image", "video"), **GLM_SEEN),
    family("Idefics2ForConditionalGeneration", ROUND_TOKENS, idefics, {
        "image_token_id": 480, "text_config": tiny_text("mistral"),
        "vision_config": {**VIT, "image_size": 56, "patch_size": 14},
        "perceiver_config": {
            "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
            "resampler_head_dim": 16, "num_key_value_heads": 1, "hidden_size": 64,
        },
    }),
]  # fmt: skip


@parametrize_sample("one", FAMILIES, every=4, ids=lambda one: one.architecture)
def test_the_bridge_sees(one, tmp_path):
    check_images(one, tmp_path)


def test_a_kind_that_the_processor_does_not_know(tmp_path):
    folder = write_family(FAMILIES[0], tmp_path)
    film = [(images([(8, 8)]), {"fps": 1.0})]
    with modulm.LLM(str(folder), max_model_len=64) as llm:
        for kind in ("video", "audio"):
            with pytest.raises(modulm.errors.RequestError, match=kind):
                llm.generate({"prompt": "a <image>", "multi_modal_data": {kind: film}})


@pytest.mark.parametrize(
    ("name", "message"),
    [("Gemma3", "bidirectional"), ("Molmo2", "bidirectional"), ("Llama4", "chunked_attention")],
)
def test_what_it_would_get_wrong_is_refused(name, message):
    settings = getattr(hf, f"{name}Config")().to_dict()
    table = {**settings, "architectures": [f"{name}ForConditionalGeneration"]}
    with pytest.raises(UnsupportedError, match=message):
        TransformersConfig.from_table(table, "config.json")
