"""Every family that reads images, with a real processor, against transformers: one row each."""

from __future__ import annotations

import json

import attrs
import pytest
import transformers as hf

from modulm.errors import CheckpointError
from modulm.nn import read_config
from modulm.plugins import manager
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
    "Qwen2VLForConditionalGeneration": (QWEN, qwen("Qwen2VLProcessor"), {}),
    "Qwen2_5_VLForConditionalGeneration": (QWEN, qwen("Qwen2_5_VLProcessor"), {}),
    "Qwen3VLForConditionalGeneration": (QWEN, qwen("Qwen3VLProcessor"), {}),
    "Qwen3VLMoeForConditionalGeneration": (QWEN, qwen("Qwen3VLProcessor"), {}),
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


@pytest.mark.parametrize("architecture", FAMILIES)
def test_images_are_read_as_by_transformers(architecture, tmp_path):
    tokens, processor, more = FAMILIES[architecture]
    check_images(ImageFamily(driver(architecture), tokens, processor, **more), tmp_path)
