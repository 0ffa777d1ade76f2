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

from attrs import frozen

__all__ = ["ProcessorFiles", "takes_video"]

#: Files with settings, by what is before "_config": of all, of the part for video, of others.
_WHOLE, _VIDEO, _REST = "processor", "video_preprocessor", "preprocessor"


@lru_cache(maxsize=1)
def takes_video() -> bool:
    """Whether torchvision is there, without which transformers itself processes no video."""
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


@frozen
class ProcessorFiles:
    """The files of a checkpoint that its processor is made from, and what is made of them.

    path: the folder. tokenizer: the folder of its tokenizer.
    """

    path: str
    tokenizer: str
    trust_remote_code: bool = False

    def table(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; empty where there is none. name: without its ending."""
        file = Path(self.path) / f"{name}.json"
        table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return table if isinstance(table, dict) else {}

    def settings(self, part: str) -> dict[str, Any]:
        """Of a part of the processor: image_processor, video_processor, audio_processor."""
        own = self.table(f"{_WHOLE}_config").get(part)
        if not own and part == "video_processor":
            own = self.table(f"{_VIDEO}_config")
        return own or self.table(f"{_REST}_config")

    @property
    def names(self) -> list[str]:
        """What the files call the processor's class, then what its model type has."""
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        files = (f"{_WHOLE}_config", f"{_REST}_config", "tokenizer_config")
        names = [self.table(file).get("processor_class") for file in files]
        own = PROCESSOR_MAPPING_NAMES.get(self.table("config").get("model_type"))
        return [str(name) for name in (*names, own) if name]

    def processor(self, images: Mapping[str, str] | None = None, video: str | None = None) -> Any:
        """The processor of the class that the files name; see `MediaFamily` for the keywords."""
        from transformers import AutoProcessor

        if takes_video() and (self.trust_remote_code or not self._foreign):
            return AutoProcessor.from_pretrained(self.path, **self._options)
        named = self._class
        if named is None:
            return AutoProcessor.from_pretrained(self.path, **self._options)
        instead = None if takes_video() else (images or {}).get(self._images)
        if "video_processor" not in named.get_attributes() and instead is None:
            return named.from_pretrained(self.path, **self._options)
        return self._from_parts(named, instead, video).from_pretrained(self.path, **self._options)

    def part(self, name: str) -> Any:
        """A part that transformers makes by itself: tokenizer, image_processor, feature_extractor,
        audio_processor; None for others.
        """
        from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

        if name == "tokenizer":
            return AutoTokenizer.from_pretrained(self.tokenizer, **self._options)
        if name == "image_processor":
            return AutoImageProcessor.from_pretrained(self.path, **self._options)
        if name in ("feature_extractor", "audio_processor"):
            return AutoFeatureExtractor.from_pretrained(self.path, **self._options)
        return None

    def from_parts(self, model_type: str, name: str, parts: Mapping[str, Any]) -> Any:
        """transformers' processor of that model type and name, of parts that are there."""
        template = self.table(f"{_WHOLE}_config").get("chat_template")
        template = template or parts["tokenizer"].chat_template
        made = _without_checks(_class_of(model_type, name))
        return made(**parts, chat_template=template)

    @property
    def _options(self) -> dict[str, Any]:
        return {"trust_remote_code": self.trust_remote_code}

    @property
    def _foreign(self) -> bool:
        """Whether the files name a class that is not transformers', beside one that is."""
        import transformers

        named = [name for name in self.names if not hasattr(transformers, name)]
        return bool(named) and self._class is not None

    @property
    def _class(self) -> Any:
        """The processor class that the files name, or that the model type has."""
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        for name in self.names:
            kinds = [kind for kind, own in PROCESSOR_MAPPING_NAMES.items() if own == name]
            for model_type in kinds:
                found = _class_of(model_type, name)
                if found is not None:
                    return found
        return None

    @property
    def _images(self) -> str:
        """What the files call the class of the part for images."""
        kind = self.settings("image_processor").get("image_processor_type")
        return str(kind).removesuffix("Fast")

    def _from_parts(self, named: Any, images: str | None, video: str | None) -> Any:
        """The processor class, with parts that are made here."""

        def part(name: str) -> Any:
            if name == "image_processor" and images is not None:
                module, _, kind = images.partition(":")
                return getattr(import_module(module), kind).from_pretrained(self.path)
            if name == "video_processor":
                made = self._video_class(video)
                return None if made is None else made.from_pretrained(self.path)
            return self.part(name)

        class FromParts(_without_checks(named)):  # type: ignore[misc]
            """That class, with the parts that it is given."""

            @classmethod
            def _get_arguments_from_pretrained(
                cls, source: Any, processor_dict: Any = None, **more: Any
            ) -> list[Any]:
                return [part(name) for name in cls.get_attributes()]

        FromParts.__name__ = named.__name__
        return FromParts

    def _video_class(self, like: str | None) -> Any:
        """The class of the part for video, None where there is none; like: the last choice."""
        from modulm_media.video import video_processor_class

        whole = self.table(f"{_WHOLE}_config").get("video_processor")
        tables = [whole if isinstance(whole, dict) else {}]
        tables += [self.table(f"{name}_config") for name in (_VIDEO, _REST)]
        key = "video_processor_type"
        names = [str(table[key]) for table in tables if key in table]
        if (named := self._class) is not None:
            names.append(named.__name__.replace("Processor", "VideoProcessor"))
        found = map(video_processor_class, [*names, *filter(None, [like])])
        return next((made for made in found if made is not None), None)


def _without_checks(named: Any) -> Any:
    """The processor class, taking any part for video: ours are strange to transformers."""

    class Unchecked(named):  # type: ignore[misc]
        """That class."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name == "video_processor":
                return None
            return super().check_argument_for_proper_class(name, argument)

    Unchecked.__name__ = named.__name__
    return Unchecked


def _class_of(model_type: str, name: str) -> Any:
    """The class from the module that defines it: transformers itself hides some behind torchvision
    that do without it.
    """
    folder = model_type.replace("-", "_")
    path = f"transformers.models.{folder}.processing_{folder}"
    if find_spec(f"transformers.models.{folder}") is None or find_spec(path) is None:
        return None
    return getattr(import_module(path), name, None)
