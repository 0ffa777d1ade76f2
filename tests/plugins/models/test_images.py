"""Every family that reads images, with a real processor, against transformers: one row each."""

from __future__ import annotations

import importlib
import json

import attrs
import pytest
import transformers as hf

from modulm.errors import CheckpointError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm_towers import tiny_text
from modulm_towers.testing import ImageFamily, check_images


def driver(architecture):
    return manager.current().load("models", architecture)


def clip(tokenizer, kind="LlavaProcessor", **settings):
    pixels = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    image = hf.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(**pixels)
    return getattr(hf, kind)(
        image, tokenizer, patch_size=7, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, **settings,
    )  # fmt: skip


def llava_next(tokenizer):
    pixels = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    image = hf.models.llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil(
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]], **pixels
    )
    return hf.LlavaNextProcessor(
        image, tokenizer, patch_size=7, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


class Files:
    """The files of a processor that transformers makes only where there is torchvision, as for
    video: the part for images, and the name of the class.
    """

    def __init__(self, kind, image, **settings):
        self.image, self.table = image, {"processor_class": kind, **settings}

    def save_pretrained(self, folder):
        self.image.save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(self.table))


def qwen(kind):
    def make(tokenizer):
        image = hf.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2,
            size={"shortest_edge": 16 * 16, "longest_edge": 40 * 40},
        )  # fmt: skip
        return Files(kind, image)

    return make


def pil(module, name, **settings):
    """An image processor that needs no torchvision."""
    found = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, name)(**settings)


def siglip_next(tokenizer):
    pixels = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    image = pil("llava_next", "LlavaNextImageProcessorPil",
                image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]], **pixels)  # fmt: skip
    return hf.LlavaNextProcessor(
        image, tokenizer, patch_size=7, vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
    )  # fmt: skip


def pixtral(merge):
    def make(tokenizer):
        image = pil("pixtral", "PixtralImageProcessorPil", patch_size=4 * merge,
                    size={"longest_edge": 32})  # fmt: skip
        return Files("PixtralProcessor", image, patch_size=4, spatial_merge_size=merge)

    return make


def gemma(tokenizer):
    image = pil("gemma3", "Gemma3ImageProcessorPil", size={"height": 56, "width": 56})
    return hf.Gemma3Processor(image, tokenizer, image_seq_length=16)


def aya(tokenizer):
    image = pil("got_ocr2", "GotOcr2ImageProcessorPil", size={"height": 28, "width": 28},
                crop_to_patches=True, max_patches=4)  # fmt: skip
    return hf.AyaVisionProcessor(image, tokenizer, patch_size=7, img_size=28, downsample_factor=2)


def idefics(module, kind):
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}

    def make(tokenizer):
        if kind == "Idefics3":
            image = pil("idefics3", "Idefics3ImageProcessorPil", **sizes)
            return hf.Idefics3Processor(image, tokenizer, image_seq_len=4)
        image = pil("smolvlm", "SmolVLMImageProcessorPil", **sizes)
        return Files("SmolVLMProcessor", image, image_seq_len=4)

    return make


def internvl(tokenizer):
    image = pil("got_ocr2", "GotOcr2ImageProcessorPil", size={"height": 28, "width": 28},
                crop_to_patches=True, min_patches=1, max_patches=4)  # fmt: skip
    return Files("InternVLProcessor", image, image_seq_length=4)


def onevision(tokenizer):
    image = pil("llava_onevision", "LlavaOnevisionImageProcessorPil",
                size={"height": 28, "width": 28},
                image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]])  # fmt: skip
    return Files(
        "LlavaOnevisionProcessor", image, num_image_tokens=16,
        vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_2",
    )  # fmt: skip


ONEVISION = {"image_token": "<image>", "video_token": "<video>"}
INTERNVL = {
    "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
    "end_image_token": "</img>", "video_token": "<video>",
}  # fmt: skip
PIXTRAL = {"image_token": "[IMG]", "0": "[IMG_BREAK]", "1": "[IMG_END]"}
GEMMA = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
AYA = {
    "0": "<|IMG_PATCH|>", "image_token": "<image>", "1": "<|START_OF_IMG|>",
    "2": "<|END_OF_IMG|>", "3": "TILE_GLOBAL", "4": "TILE_1", "5": "TILE_2",
}  # fmt: skip
IDEFICS = {
    "image_token": "<image>", "0": "<fake_token_around_image>", "1": "<global-img>",
    "2": "<row_1_col_1>", "3": "<row_1_col_2>", "4": "<end_of_utterance>",
}  # fmt: skip
QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
IMAGE = {"image_token": "<image>"}
#: Architecture -> its special tokens, what makes its processor, and the rest of `ImageFamily`.
FAMILIES = {
    "LlavaForConditionalGeneration": (IMAGE, clip, {}),
    "LlavaNextForConditionalGeneration": (IMAGE, llava_next, {}),
    "LlavaOnevisionForConditionalGeneration": (ONEVISION, onevision, {}),
    "Qwen2VLForConditionalGeneration": (QWEN, qwen("Qwen2VLProcessor"), {}),
    "Qwen2_5_VLForConditionalGeneration": (QWEN, qwen("Qwen2_5_VLProcessor"), {}),
    "Qwen3VLForConditionalGeneration": (QWEN, qwen("Qwen3VLProcessor"), {}),
    "Qwen3VLMoeForConditionalGeneration": (QWEN, qwen("Qwen3VLProcessor"), {}),
    "Gemma3ForConditionalGeneration": (GEMMA, gemma, {"chunk": 20}),
    "Idefics3ForConditionalGeneration": (IDEFICS, idefics("idefics3", "Idefics3"), {}),
    "SmolVLMForConditionalGeneration": (IDEFICS, idefics("smolvlm", "SmolVLM"), {}),
    "Mistral3ForConditionalGeneration": (PIXTRAL, pixtral(2), {}),
    "AyaVisionForConditionalGeneration": (AYA, aya, {}),
    "InternVLForConditionalGeneration": (INTERNVL, internvl, {}),
}


def test_every_model_that_takes_media_is_in_the_table():
    """And says in both places the same of what it takes."""
    plugins = manager.current()
    assert {declared.name for declared in plugins.names("media_families")} == set(FAMILIES)
    for name in FAMILIES:
        assert plugins.load("media_families", name).kinds == plugins.load("models", name).media


@pytest.mark.parametrize("architecture", FAMILIES)
def test_nonsense_in_the_encoders_numbers_is_refused(architecture):
    table = driver(architecture).tiny()
    read = {field.name for field in attrs.fields(driver(architecture).config_type.vision_type)}
    vision = table["vision_config"]
    numbers = [key for key, value in vision.items() if type(value) is int and key in read]
    assert len(numbers) > 3
    for key in numbers:
        for wrong in ("word", float("nan"), [1], -5):
            changed = {**table, "vision_config": {**vision, key: wrong}}
            with pytest.raises(CheckpointError, match="config.json"):
                read_config(changed, driver(architecture).config_type)


#: Other shapes of some: Pixtral 12B, and Granite Vision, which reads several layers of SigLIP.
SHAPES = {
    "pixtral": (
        "LlavaForConditionalGeneration", PIXTRAL, pixtral(1),
        {
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
                "image_size": 32, "patch_size": 4,
            },
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "granite": (
        "LlavaNextForConditionalGeneration", IMAGE, siglip_next,
        {
            "text_config": tiny_text("granite"),
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
                "patch_size": 7,
            },
            "vision_feature_layer": [-3, -1],
            "vision_feature_select_strategy": "full",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes_of_families(shape, tmp_path):
    architecture, tokens, processor, changes = SHAPES[shape]
    family = ImageFamily(driver(architecture), tokens, processor, changes=changes)
    check_images(family, tmp_path)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_images_are_read_as_by_transformers(architecture, tmp_path):
    tokens, processor, more = FAMILIES[architecture]
    check_images(ImageFamily(driver(architecture), tokens, processor, **more), tmp_path)
