"""transformers' image processors for torchvision, run without it.

A checkpoint's images have the same pixels whether torchvision is installed or not: the published
processors are those for torchvision, and resize otherwise than Pillow. `modulm_media.video` has the
functions that they need.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["image_processor_class", "processor_name"]


def processor_name(settings: dict[str, Any], model_type: Any) -> str:
    """The name of transformers' image processor for torchvision; empty if there is none.

    settings: of the image processor, in a checkpoint's files. model_type: of config.json, whose
    processor is the default.
    """
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    name = settings.get("image_processor_type") or settings.get("feature_extractor_type")
    if name is None:
        name = (IMAGE_PROCESSOR_MAPPING_NAMES.get(str(model_type)) or {}).get("torchvision")
    name = str(name or "").replace("FeatureExtractor", "ImageProcessor")
    return name.removesuffix("Fast").removesuffix("Pil")


@lru_cache(maxsize=32)
def image_processor_class(name: str) -> Any:
    """transformers' image processor for torchvision of that name.

    None if it has none, or if that needs functions that `modulm_media.video` lacks.
    """
    from modulm_media.video import functions, loaded

    spec = find_spec("transformers.models")
    models = Path(str(spec.origin)).parent if spec is not None else Path()
    for file in sorted(models.glob("*/image_processing_*.py")) if name else ():
        source = file.read_text(encoding="utf-8")
        if file.stem.startswith("image_processing_pil") or f"\nclass {name}(" not in source:
            continue
        if set(re.findall(r"\btvF\.(\w+)", source)) <= set(vars(functions())):
            return getattr(loaded(f"transformers.models.{file.parent.name}.{file.stem}"), name)
    return None
