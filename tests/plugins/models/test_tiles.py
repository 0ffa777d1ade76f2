"""Image processors that need torchvision in transformers: the same tiles without it."""

from __future__ import annotations

import numpy as np
import pytest
import transformers as hf
from PIL import Image

from modulm_media.images import image_processor_class
from modulm_media.processors import takes_video
from modulm_phi.tiles import Phi4MultimodalImageProcessorPil

SIDE = {"height": 28, "width": 28}


def image(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def made(name, picture):
    """What transformers' processor for torchvision makes of an image, without torchvision."""
    kind = getattr(hf, name) if takes_video() else image_processor_class(name)
    return kind(size=SIDE, max_patches=4)(picture, return_tensors="pt")


@pytest.mark.parametrize(
    ("size", "tiles"),
    [((28, 28), 1), ((56, 28), 3), ((20, 50), 3), ((400, 100), 5), ((100, 100), 5), ((50, 40), 5)],
)
def test_command_a_enlarges_as_little_as_it_can(size, tiles):
    outputs = made("Cohere2VisionImageProcessor", image(*size))
    assert np.shape(outputs["pixel_values"]) == (tiles, 3, 28, 28)
    assert [int(count) for count in outputs["num_patches"]] == [tiles]


@pytest.mark.parametrize(
    ("size", "grid"),
    [((28, 28), [1, 1]), ((10, 10), [1, 1]), ((56, 20), [1, 2]), ((20, 80), [3, 1]),
     ((300, 100), [1, 3]), ((56, 56), [2, 2])],
)  # fmt: skip
def test_llama_4_takes_the_canvas_that_fits_best(size, grid):
    outputs = made("Llama4ImageProcessor", image(*size))
    tiles = grid[0] * grid[1]
    assert np.asarray(outputs["aspect_ratios"]).tolist() == [grid]
    assert np.shape(outputs["pixel_values"]) == (tiles + (tiles > 1), 3, 28, 28)


def test_llama_4_pads_with_black_and_counts_as_it_was_trained():
    """In bfloat16, of which about eight bits count."""
    white = Image.fromarray(np.full((28, 14, 3), 255, np.uint8))
    (pixels,) = made("Llama4ImageProcessor", white)["pixel_values"].float().numpy()
    assert (pixels[:, :, :14] == pixels[0, 0, 0]).all()
    assert pixels[0, 0, 0] == pytest.approx(1, abs=0.02)
    assert (pixels[:, :, 14:] == -1).all()


@pytest.mark.parametrize(
    ("size", "canvas", "tokens"),
    # With 32 patches to a side, as in Phi-4 multimodal: 256 + 16 + 1 of the copy, then the squares
    # of the tiles and the ends of their rows.
    [((32, 32), [32, 32], 16 * 17), ((96, 72), [96, 96], 36 * 49), ((22, 32), [32, 32], 16 * 12),
     ((320, 32), [32, 320], 16 * 161), ((658, 143), [64, 288], 31 * 145),
     ((640, 320), [128, 256], 64 * 129)],
)  # fmt: skip
def test_phi_4_takes_whole_tiles_that_hold_the_image(size, canvas, tokens):
    side = {"height": 32, "width": 32}
    outputs = Phi4MultimodalImageProcessorPil(size=side, patch_size=1)(image(*size))
    assert outputs["image_sizes"].tolist() == [canvas]
    assert outputs["num_img_tokens"] == [273 + tokens]


def test_phi_4_pads_with_white_that_is_no_part_of_the_image():
    black = Image.fromarray(np.zeros((28, 14, 3), np.uint8))
    outputs = Phi4MultimodalImageProcessorPil(size=SIDE, patch_size=7)(black)
    copy, tile = outputs["image_pixel_values"][0]
    assert (copy == tile).all()
    assert (tile[:, :, :14] == -1).all()
    assert (tile[:, :, 14:] == 1).all()
    whole, filled = outputs["image_attention_mask"][0]
    assert whole.all()
    assert filled.tolist() == [[1, 1, 0, 0]] * 4


def test_phi_4_refuses_images_of_which_nothing_would_be_left():
    with pytest.raises(ValueError, match="too narrow"):
        Phi4MultimodalImageProcessorPil(size=SIDE, patch_size=7)(image(2000, 3))
