"""The checkpoint's processor, as transformers has it.

transformers makes the processors of families that also take video only where torchvision is
installed and fits torch, although their images need none of it. Here the rest of them is made.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modulm.errors import CheckpointError
from modulm_media.pixtral import RowsProcessor

__all__ = ["load_processor", "takes_video"]


@lru_cache(maxsize=4)
def load_processor(path: str, tokenizer: str, trust_remote_code: bool = False) -> Any:
    """The `ProcessorMixin` of the checkpoint at `path`; slow to make, so it is kept.

    tokenizer: the folder of its tokenizer. Raises CheckpointError.
    """
    from transformers import AutoProcessor

    options = {"trust_remote_code": trust_remote_code}
    try:
        if takes_video():
            return AutoProcessor.from_pretrained(path, **options)
        return _without_video(path, tokenizer, options)
    except Exception as error:
        raise CheckpointError(f"{path}: its processor cannot be made: {error}") from error


@lru_cache(maxsize=1)
def takes_video() -> bool:
    """Whether torchvision is there, without which transformers processes no video."""
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


def _without_video(path: str, tokenizer: str, options: dict[str, Any]) -> Any:
    """The processor of the class that the files name, its video part left out."""
    from transformers import AutoProcessor

    if "PixtralProcessor" in _names(Path(path)):
        words = _part("tokenizer", path, tokenizer, options)
        images = _part("image_processor", path, tokenizer, options)
        return RowsProcessor(words, images, _table(Path(path) / "processor_config.json"))
    named = _class_named(Path(path))
    if named is None:
        return AutoProcessor.from_pretrained(path, **options)
    if "video_processor" not in named.get_attributes():
        return named.from_pretrained(path, **options)
    return _class_without(named, tokenizer, options).from_pretrained(path, **options)


def _class_without(named: Any, tokenizer: str, options: dict[str, Any]) -> Any:
    """The processor class, without a part for video; tokenizer: the folder it is loaded from."""

    class WithoutVideo(named):  # type: ignore[misc]
        """That class, without a part for video."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name == "video_processor":
                return None
            return super().check_argument_for_proper_class(name, argument)

        @classmethod
        def _get_arguments_from_pretrained(
            cls, source: Any, processor_dict: Any = None, **more: Any
        ) -> list[Any]:
            return [_part(name, source, tokenizer, options) for name in cls.get_attributes()]

    WithoutVideo.__name__ = named.__name__
    return WithoutVideo


def _part(name: str, path: str, tokenizer: str, options: dict[str, Any]) -> Any:
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

    if name == "tokenizer":
        return AutoTokenizer.from_pretrained(tokenizer, **options)
    if name == "image_processor":
        return AutoImageProcessor.from_pretrained(path, **options)
    if name == "feature_extractor":
        return AutoFeatureExtractor.from_pretrained(path, **options)
    return None


def _class_named(folder: Path) -> Any:
    """The processor class that the folder's files name, or that its model type has."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    for name in _names(folder):
        for model_type in [kind for kind, own in PROCESSOR_MAPPING_NAMES.items() if own == name]:
            found = _class_of(model_type, str(name))
            if found is not None:
                return found
    return None


def _names(folder: Path) -> list[Any]:
    """What the files call the processor's class, then what its model type has."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    files = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
    names = [_table(folder / file).get("processor_class") for file in files]
    own = PROCESSOR_MAPPING_NAMES.get(_table(folder / "config.json").get("model_type"))
    return [name for name in (*names, own) if name]


def _class_of(model_type: str, name: str) -> Any:
    """The class from the module that defines it: transformers itself hides some behind torchvision
    that do without it.
    """
    folder = model_type.replace("-", "_")
    path = f"transformers.models.{folder}.processing_{folder}"
    if find_spec(f"transformers.models.{folder}") is None or find_spec(path) is None:
        return None
    return getattr(import_module(path), name, None)


def _table(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    table = json.loads(file.read_text(encoding="utf-8"))
    return table if isinstance(table, dict) else {}
