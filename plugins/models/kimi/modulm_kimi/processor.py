"""The processor of Kimi-VL and Kimi K2.5, from transformers' files or Moonshot AI's own.

Moonshot's files name code in the checkpoint, which is not executed. transformers' processor of Kimi
K2.5 does the same with these settings, also for images of Kimi-VL.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from modulm_media.processors import ProcessorFiles

__all__ = ["open_processor"]

#: transformers' model type and class.
_PROCESSOR = ("kimi_k25", "Kimi_K25Processor")
_IMAGES = "transformers.models.kimi_k25.image_processing_kimi_k25"
#: Keys of Moonshot's files, for images of Kimi-VL and of Kimi K2.5, and transformers' names.
_SETTINGS = {
    "patch_size": "patch_size",
    "image_mean": "image_mean",
    "image_std": "image_std",
    "in_token_limit": "max_patches",
    "in_patch_limit": "max_patches",
}


def open_processor(files: ProcessorFiles) -> Any:
    """Create transformers' processor from these files. Raises ValueError for unsupported
    settings.
    """
    parts = {
        "image_processor": _image_part(files.settings("image_processor")),
        "tokenizer": files.part("tokenizer"),
        "video_processor": _video_part(files.settings("video_processor")),
    }
    return files.from_parts(*_PROCESSOR, parts)


def _image_part(table: Mapping[str, Any]) -> Any:
    """The image processor of the settings of a file."""
    from modulm_media.video import loaded

    has_torchvision = find_spec("torchvision") is not None
    module = import_module(_IMAGES) if has_torchvision else loaded(_IMAGES)
    return module.Kimi_K25ImageProcessor(**_settings(table))


def _video_part(table: Mapping[str, Any]) -> Any:
    """The video processor of the settings of a file."""
    from modulm_media.video import video_processor_class

    video_settings = table.get("media_proc_cfg")
    settings = _settings(table)
    if isinstance(video_settings, Mapping):
        further = {
            "max_patches": video_settings.get("in_patch_limit_each_frame"),
            "temporal_patch_size": video_settings.get("temporal_merge_kernel_size"),
            "fps": video_settings.get("sample_fps"),
        }
        settings |= {key: value for key, value in further.items() if value is not None}
    return video_processor_class("Kimi_K25VideoProcessor")(**settings)


def _settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for transformers' classes. Raises ValueError for unsupported settings."""
    settings = table.get("media_proc_cfg", table)
    if not isinstance(settings, Mapping) or "merge_kernel_size" not in settings:
        return {key: value for key, value in table.items() if not key.endswith("processor_type")}
    if not settings.get("pad_input", True):
        raise ValueError("pad_input: not supported yet: false")
    renamed = {
        name: settings[key] for key, name in _SETTINGS.items() if settings.get(key) is not None
    }
    merge, side = settings["merge_kernel_size"], settings.get("patch_limit_on_one_side", 512)
    high, wide = (merge, merge) if isinstance(merge, int) else merge
    if high != wide:
        raise ValueError(f"merge_kernel_size: {merge}")
    return {**renamed, "merge_size": high, "size": {"max_height": side, "max_width": side}}
