"""Images have the same pixels with torchvision and without it: those of torchvision 0.28."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

from modulm_media.images import image_processor_class, processor_name
from modulm_media.processors import takes_video

SMALL = {"size": {"height": 28, "width": 28}}
#: transformers' processors -> settings, and `weighed` of what they make of `picture()`.
PROCESSORS = {
    "CLIPImageProcessor": (
        {"size": {"shortest_edge": 28}, "crop_size": SMALL["size"]}, 0.102172056191,
    ),
    "DeepseekVLImageProcessor": ({**SMALL, "min_size": 7}, 0.057320537298),
    "Gemma3ImageProcessor": (SMALL, -0.063997467873),
    "GotOcr2ImageProcessor": ({**SMALL, "crop_to_patches": True, "max_patches": 4}, 0.074572493292),
    "Idefics3ImageProcessor": (
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}, -0.042668143105,
    ),
    "Lfm2VlImageProcessor": (
        {"tile_size": 64, "max_image_tokens": 12, "min_image_tokens": 4}, -0.02248945383,
    ),
    "Llama4ImageProcessor": ({**SMALL, "max_patches": 4}, -0.338019047037),
    "LlavaNextImageProcessor": (
        {"size": {"shortest_edge": 28}, "crop_size": SMALL["size"],
         "image_grid_pinpoints": [[28, 56], [56, 28]]}, -0.19482288358,
    ),
    "Ovis2ImageProcessor": ({**SMALL, "crop_to_patches": True, "max_patches": 4}, 0.106961242672),
    "PixtralImageProcessor": ({"size": {"longest_edge": 32}, "patch_size": 8}, 0.092297510103),
    "Qwen2VLImageProcessor": (
        {"size": {"shortest_edge": 784, "longest_edge": 3136}, "patch_size": 14}, 0.092312126505,
    ),
    "SmolVLMImageProcessor": (
        {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}, -0.042668143105,
    ),
}  # fmt: skip


def picture():
    """61 by 97 pixels, whose colors change slowly and at an edge."""
    y, x = np.mgrid[:97, :61]
    channels = [np.sin(y / 9) * 90 + 120, (x * y) % 200, np.where(x > 30, 220, y)]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def weighed(outputs):
    """A sum over pixels by their places."""
    values = torch.as_tensor(outputs["pixel_values" if "pixel_values" in outputs else
                                     "image_pixel_values"]).double().flatten()  # fmt: skip
    return float((values * torch.linspace(0.5, 1.5, len(values), dtype=torch.float64)).mean())


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_makes_the_pixels_that_it_makes_with_torchvision(name):
    settings, expected = PROCESSORS[name]
    kind = getattr(hf, name) if takes_video() else image_processor_class(name)
    outputs = kind(**settings)(images=[picture()], return_tensors="pt")
    assert weighed(outputs) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"image_processor_type": "Idefics3ImageProcessorFast"}, "Idefics3ImageProcessor"),
        ({"image_processor_type": "CLIPImageProcessorPil"}, "CLIPImageProcessor"),
        ({"feature_extractor_type": "CLIPFeatureExtractor"}, "CLIPImageProcessor"),
        ({}, "Qwen2VLImageProcessor"),
    ],
)
def test_files_name_a_processor_in_several_ways(settings, name):
    assert processor_name(settings, "qwen2_vl") == name
    assert processor_name({}, "nothing") == ""
    assert image_processor_class("") is None
