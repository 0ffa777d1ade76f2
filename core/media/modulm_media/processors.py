"""The checkpoint's processor, as transformers has it.

transformers makes the processors of families that also take video only where torchvision is
installed and fits torch. Here they are made without it, their part for video by `video`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modulm.errors import CheckpointError
from modulm_media import moonshot
from modulm_media.granite_speech import SpeechProcessor
from modulm_media.pixtral import RowsProcessor

__all__ = ["load_processor", "takes_video"]

#: Of `modulm_media.tiles`.
_STAND_INS = (
    "Cohere2VisionImageProcessorPil",
    "Llama4ImageProcessorPil",
    "Phi4MultimodalImageProcessorPil",
)
#: Files with the settings of a part for video, without their endings.
_PARTS = ("video_preprocessor", "preprocessor")


@lru_cache(maxsize=4)
def load_processor(path: str, tokenizer: str, trust_remote_code: bool = False) -> Any:
    """The `ProcessorMixin` of the checkpoint at `path`; slow to make, so it is kept.

    tokenizer: the folder of its tokenizer. Raises CheckpointError.
    """
    from transformers import AutoProcessor

    options = {"trust_remote_code": trust_remote_code}
    try:
        if "GraniteSpeechProcessor" in _names(Path(path)) and find_spec("torchaudio") is None:
            return _speech(path, tokenizer, options)
        if moonshot.is_moonshots(_table(Path(path) / "config.json")):
            return _moonshots(path, tokenizer, options)
        if takes_video() and (trust_remote_code or not _foreign(Path(path))):
            return AutoProcessor.from_pretrained(path, **options)
        return _without_video(path, tokenizer, options)
    except Exception as error:
        raise CheckpointError(f"{path}: its processor cannot be made: {error}") from error


def _foreign(folder: Path) -> bool:
    """Whether the files name a class that is not transformers', beside one that is."""
    import transformers

    named = [name for name in _names(folder) if not hasattr(transformers, str(name))]
    return bool(named) and _class_named(folder) is not None


@lru_cache(maxsize=1)
def takes_video() -> bool:
    """Whether torchvision is there, without which transformers itself processes no video."""
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


def _without_video(path: str, tokenizer: str, options: dict[str, Any]) -> Any:
    """The processor of the class that the files name."""
    from transformers import AutoProcessor

    if "PixtralProcessor" in _names(Path(path)):
        words = _part("tokenizer", path, tokenizer, options)
        images = _part("image_processor", path, tokenizer, options)
        return RowsProcessor(words, images, _table(Path(path) / "processor_config.json"))
    named = _class_named(Path(path))
    if named is None:
        return AutoProcessor.from_pretrained(path, **options)
    if "video_processor" not in named.get_attributes() and not _stand_in(path):
        return named.from_pretrained(path, **options)
    return _class_from_parts(named, tokenizer, options).from_pretrained(path, **options)


def _speech(path: str, tokenizer: str, options: dict[str, Any]) -> SpeechProcessor:
    """Granite Speech's, which transformers makes only where there is torchaudio."""
    whole = _table(Path(path) / "processor_config.json")
    table = whole.get("audio_processor") or _table(Path(path) / "preprocessor_config.json")
    words = _part("tokenizer", path, tokenizer, options)
    return SpeechProcessor(words, table, whole.get("audio_token"))


def _moonshots(path: str, tokenizer: str, options: dict[str, Any]) -> Any:
    """Kimi-VL's and Kimi K2.5's, whose own is code that comes with the checkpoint."""
    whole, given = (_table(Path(path) / f"{name}_config.json") for name in ("processor", _PARTS[1]))
    films = whole.get("video_processor") or _table(Path(path) / f"{_PARTS[0]}_config.json")
    named = _class_from_parts(_class_of(*moonshot.PROCESSOR), tokenizer, options)
    words = _part("tokenizer", path, tokenizer, options)
    template = whole.get("chat_template", words.chat_template)
    images = moonshot.image_part(whole.get("image_processor") or given)
    return named(images, words, moonshot.video_part(films or given), chat_template=template)


def _class_from_parts(named: Any, tokenizer: str, options: dict[str, Any]) -> Any:
    """The processor class, with parts that are made here; tokenizer: the folder of that one."""

    class FromParts(named):  # type: ignore[misc]
        """That class, with the parts that it is given."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name == "video_processor":
                return None
            return super().check_argument_for_proper_class(name, argument)

        @classmethod
        def _get_arguments_from_pretrained(
            cls, source: Any, processor_dict: Any = None, **more: Any
        ) -> list[Any]:
            return [_part(name, source, tokenizer, options) for name in cls.get_attributes()]

    FromParts.__name__ = named.__name__
    return FromParts


def _part(name: str, path: str, tokenizer: str, options: dict[str, Any]) -> Any:
    from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

    if name == "tokenizer":
        return AutoTokenizer.from_pretrained(tokenizer, **options)
    if name == "image_processor" and (instead := _stand_in(path)):
        return getattr(import_module("modulm_media.tiles"), instead).from_pretrained(path)
    if name == "image_processor":
        return AutoImageProcessor.from_pretrained(path, **options)
    if name in ("feature_extractor", "audio_processor"):
        return AutoFeatureExtractor.from_pretrained(path, **options)
    if name == "video_processor":
        made = _video_class(Path(path))
        return None if made is None else made.from_pretrained(path)
    return None


def _stand_in(path: str) -> str | None:
    """The class of `modulm_media.tiles` for an image processor that needs torchvision."""
    table = _table(Path(path) / "processor_config.json").get("image_processor")
    table = table or _table(Path(path) / "preprocessor_config.json")
    kind = f"{str(table.get('image_processor_type')).removesuffix('Fast')}Pil"
    return kind if kind in _STAND_INS else None


#: Model types whose video processor is another's.
_LIKE: Mapping[str, str] = {
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    "qwen3_vl_moe": "Qwen3VLVideoProcessor",
    "qwen3_5": "Qwen3VLVideoProcessor",
    "qwen3_5_moe": "Qwen3VLVideoProcessor",
    "qwen2_5_omni": "Qwen2VLVideoProcessor",
    "qwen2_5_omni_thinker": "Qwen2VLVideoProcessor",
    "qwen3_omni_moe": "Qwen2VLVideoProcessor",
    "qwen3_omni_moe_thinker": "Qwen2VLVideoProcessor",
    "glm4v_moe": "Glm4vVideoProcessor",
    "exaone4_5": "Qwen2VLVideoProcessor",
}


def _video_class(folder: Path) -> Any:
    """The class of the part for video, None where the files have none."""
    from modulm_media.video import video_processor_class

    whole = _table(folder / "processor_config.json").get("video_processor")
    tables = [whole if isinstance(whole, dict) else {}]
    tables += [_table(folder / f"{name}_config.json") for name in _PARTS]
    names = [
        str(table["video_processor_type"]) for table in tables if "video_processor_type" in table
    ]
    kind = str(_table(folder / "config.json").get("model_type"))
    names += [_LIKE[kind]] if kind in _LIKE else []
    names += (
        [named.__name__.replace("Processor", "VideoProcessor")]
        if (named := _class_named(folder))
        else []
    )
    found = (video_processor_class(name) for name in names)
    return next((made for made in found if made is not None), None)


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
