"""The processor of InternVL's published files, from transformers' parts.

The files name code of OpenGVLab, which is not run. Sizes and numbers of tiles are in config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from modulm_media.processors import ProcessorFiles

__all__ = ["open_processor", "published_processor"]

_IMAGES = "transformers.models.got_ocr2.image_processing_pil_got_ocr2"
_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
}
#: ImageNet's.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def open_processor(files: ProcessorFiles) -> Any:
    """Create transformers' processor from published files.

    Raises ValueError for a tokenizer without InternVL's tokens, and for settings that are not
    supported.
    """
    if not isinstance(files.table("config").get("llm_config"), Mapping):
        return files.processor()
    return published_processor(files, _TOKENS)


def published_processor(files: ProcessorFiles, tokens: Mapping[str, str] = _TOKENS) -> Any:
    """Create transformers' processor from published files; tokens: attribute to token.

    Raises ValueError for a tokenizer without the tokens, and for settings that are not supported.
    """
    from modulm_media.video import video_processor_class

    config = files.table("config")
    if not config.get("use_thumbnail", True):
        raise ValueError("use_thumbnail: not supported yet: false")
    vision = config.get("vision_config") or {}
    side = int(config.get("force_image_size") or vision.get("image_size", 448))
    size = {"height": side, "width": side}
    pixels = files.table("preprocessor_config")
    normal = {
        "image_mean": pixels.get("image_mean", _MEAN),
        "image_std": pixels.get("image_std", _STD),
    }
    images = import_module(_IMAGES).GotOcr2ImageProcessorPil(
        size=size,
        crop_to_patches=bool(config.get("dynamic_image_size", True)),
        min_patches=int(config.get("min_dynamic_patch", 1)),
        max_patches=int(config.get("max_dynamic_patch", 12)),
        **normal,
    )
    videos = video_processor_class("InternVLVideoProcessor")(size=size, **normal)
    tokenizer = files.part("tokenizer")
    for name in _TOKENS:  # transformers' class asks for all, and the family for its own.
        if name not in tokens:
            for attribute in (name, f"{name}_id"):
                object.__setattr__(tokenizer, attribute, None)
    for name, token in tokens.items():
        number = tokenizer.convert_tokens_to_ids(token)
        if number is None or number == tokenizer.unk_token_id:
            raise ValueError(f"its tokenizer has no token {token}")
        for attribute, value in ((name, token), (f"{name}_id", number)):
            object.__setattr__(tokenizer, attribute, value)
    object.__setattr__(tokenizer, "video_token", "<video>")
    patches = side // int(vision.get("patch_size", 14))
    tokens = int((patches * float(config.get("downsample_ratio", 0.5))) ** 2)
    parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": videos}
    processor = files.from_parts("internvl", "InternVLProcessor", parts)
    processor.image_seq_length = tokens
    return processor
