"""DeepSeek-OCR 2: what its encoder has no queries for is refused, in the file and in requests."""

from __future__ import annotations

import pytest
from PIL import Image
from transformers import DeepseekOcr2Processor
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import (
    DeepseekOcr2ImageProcessorPil,
)

from modulm.errors import CheckpointError, RequestError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tokenizer
from modulm_media import Media

NAME = "DeepseekOcr2ForConditionalGeneration"
SIZE = {"height": 48, "width": 48}


def tiny(part, **changes):
    table = manager.current().load("models", NAME).tiny()
    vision = table["vision_config"]
    return {**table, "vision_config": {**vision, part: {**vision[part], **changes}}}


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("sam_config", {"downsample_channels": [16, 24]}, "downsample_channels"),
        ("encoder_config", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("encoder_config", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window"),
        ("encoder_config", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "linear"),
    ],
)
def test_encoders_that_are_not_written_are_refused(part, changes, message):
    with pytest.raises(CheckpointError, match=message):
        read_config(tiny(part, **changes), manager.current().load("models", NAME).config_type)


def test_images_of_sizes_without_queries_are_refused(tmp_path):
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image = DeepseekOcr2ImageProcessorPil(tile_size=64, size=SIZE)
    processor = DeepseekOcr2Processor(image, tokenizer, patch_size=1)
    family = manager.current().load("media_families", NAME)(processor, {})
    media = Media("image", Image.new("RGB", (40, 40)), hash=b"")
    assert family.process(media, {}).embedded.sum() == 145
    with pytest.raises(RequestError, match="144 or 256 queries"):
        family.process(media, {"size": {"height": 32, "width": 32}})
