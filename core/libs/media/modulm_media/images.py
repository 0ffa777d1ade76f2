"""transformers' image processors for torchvision, run without it.

`modulm_media.video` has the functions that they need.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["image_processor_class"]


@lru_cache(maxsize=32)
def image_processor_class(name: str) -> Any:
    """transformers' image processor of that name, None if it has none.

    name: as in files, without the suffix "Fast".
    """
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    from modulm_media.video import loaded

    models = Path(str(find_spec("transformers.models").origin)).parent  # type: ignore[union-attr]
    folders = (key.replace("-", "_") for key in IMAGE_PROCESSOR_MAPPING_NAMES)
    for folder in dict.fromkeys(folder for folder in folders if (models / folder).is_dir()):
        file = models / folder / f"image_processing_{folder}.py"
        if file.is_file() and f"\nclass {name}(" in file.read_text(encoding="utf-8"):
            return getattr(loaded(f"transformers.models.{folder}.{file.stem}"), name)
    return None
