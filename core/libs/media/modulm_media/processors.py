"""The checkpoint's processor, as transformers builds it.

transformers builds processors of families that also take video only if a torchvision that fits
torch is installed. Here they are built without it; `modulm_media.video` provides the video part.
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

#: Stems of the settings files ("_config" follows): processor, video processor, all other parts.
_WHOLE, _VIDEO, _REST = "processor", "video_preprocessor", "preprocessor"


@lru_cache(maxsize=1)
def takes_video() -> bool:
    """Whether torchvision is installed, which transformers needs to process video."""
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


@frozen
class ProcessorFiles:
    """A checkpoint's files for its processor, and the processor built from them.

    path: the checkpoint's folder. tokenizer: the folder of its tokenizer.
    """

    path: str
    tokenizer: str
    trust_remote_code: bool = False

    def table(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the folder; empty if it does not exist. name: without extension."""
        file = Path(self.path) / f"{name}.json"
        table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return table if isinstance(table, dict) else {}

    def settings(self, part: str) -> dict[str, Any]:
        """Settings of a part: image_processor, video_processor or audio_processor."""
        settings = self.table(f"{_WHOLE}_config").get(part)
        if not settings and part == "video_processor":
            settings = self.table(f"{_VIDEO}_config")
        return settings or self.table(f"{_REST}_config")

    @property
    def names(self) -> list[str]:
        """Names of the processor's class: those in the files, then the model type's default."""
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        files = (f"{_WHOLE}_config", f"{_REST}_config", "tokenizer_config")
        names = [self.table(file).get("processor_class") for file in files]
        default = PROCESSOR_MAPPING_NAMES.get(self.table("config").get("model_type"))
        return [str(name) for name in (*names, default) if name]

    def processor(self, images: Mapping[str, str] | None = None, video: str | None = None) -> Any:
        """Build the processor of the class that the files name.

        images, video: replacements for parts that need torchvision, see `MediaFamily`.
        """
        from transformers import AutoProcessor

        if takes_video() and (self.trust_remote_code or not self._foreign):
            return AutoProcessor.from_pretrained(self.path, **self._options)
        processor_class = self._class
        if processor_class is None:
            return AutoProcessor.from_pretrained(self.path, **self._options)
        replacement = None if takes_video() else (images or {}).get(self._images)
        plain = replacement is None and self._torch_class is None
        if "video_processor" not in processor_class.get_attributes() and plain:
            return processor_class.from_pretrained(self.path, **self._options)
        return self._from_parts(processor_class, replacement, video).from_pretrained(
            self.path, **self._options
        )

    def part(self, name: str) -> Any:
        """A part that transformers builds on its own; None for other names.

        These are tokenizer, image_processor, feature_extractor and audio_processor.
        """
        from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer

        if name == "tokenizer":
            return AutoTokenizer.from_pretrained(self.tokenizer, **self._options)
        if name == "image_processor":
            image_class = self._torch_class or AutoImageProcessor
            return image_class.from_pretrained(self.path, **self._options)
        if name in ("feature_extractor", "audio_processor"):
            return AutoFeatureExtractor.from_pretrained(self.path, **self._options)
        return None

    def from_parts(self, model_type: str, name: str, parts: Mapping[str, Any]) -> Any:
        """Build transformers' processor of a model type and name from existing parts."""
        template = self.table(f"{_WHOLE}_config").get("chat_template")
        template = template or parts["tokenizer"].chat_template
        processor_class = _without_checks(_class_of(model_type, name))
        return processor_class(**parts, chat_template=template)

    @property
    def _options(self) -> dict[str, Any]:
        return {"trust_remote_code": self.trust_remote_code}

    @property
    def _foreign(self) -> bool:
        """Whether the files name a custom class in addition to one of transformers."""
        import transformers

        custom = [name for name in self.names if not hasattr(transformers, name)]
        return bool(custom) and self._class is not None

    @property
    def _class(self) -> Any:
        """The processor class that the files name, or the model type's default."""
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        for name in self.names:
            kinds = [
                kind for kind, registered in PROCESSOR_MAPPING_NAMES.items() if registered == name
            ]
            for model_type in kinds:
                processor_class = _class_of(model_type, name)
                if processor_class is not None:
                    return processor_class
        return None

    @property
    def _images(self) -> str:
        """Class name of the image processor in the files."""
        kind = self.settings("image_processor").get("image_processor_type")
        return str(kind).removesuffix("Fast")

    @property
    def _torch_class(self) -> Any:
        """The image processor's class for torchvision; None with torchvision, or without one."""
        from modulm_media.images import image_processor_class, processor_name

        if takes_video():
            return None
        settings, model_type = (
            self.settings("image_processor"),
            self.table("config").get("model_type"),
        )
        return image_processor_class(processor_name(settings, model_type))

    def _from_parts(self, processor_class: Any, images: str | None, video: str | None) -> Any:
        """Create a subclass of the processor class whose parts are built here."""

        def part(name: str) -> Any:
            if name == "image_processor" and images is not None:
                module, _, kind = images.partition(":")
                return getattr(import_module(module), kind).from_pretrained(self.path)
            if name == "video_processor":
                video_class = self._video_class(video)
                return None if video_class is None else video_class.from_pretrained(self.path)
            return self.part(name)

        class FromParts(_without_checks(processor_class)):  # type: ignore[misc]
            """The processor class, with these parts."""

            @classmethod
            def _get_arguments_from_pretrained(
                cls, source: Any, processor_dict: Any = None, **more: Any
            ) -> list[Any]:
                return [part(name) for name in cls.get_attributes()]

        FromParts.__name__ = processor_class.__name__
        return FromParts

    def _video_class(self, like: str | None) -> Any:
        """Return the video processor's class, None if there is none. like: the last candidate."""
        from modulm_media.video import video_processor_class

        settings = self.table(f"{_WHOLE}_config").get("video_processor")
        tables = [settings if isinstance(settings, dict) else {}]
        tables += [self.table(f"{name}_config") for name in (_VIDEO, _REST)]
        key = "video_processor_type"
        names = [str(table[key]) for table in tables if key in table]
        if (processor_class := self._class) is not None:
            names.append(processor_class.__name__.replace("Processor", "VideoProcessor"))
        candidates = map(video_processor_class, [*names, *filter(None, [like])])
        return next((candidate for candidate in candidates if candidate is not None), None)


def _without_checks(processor_class: Any) -> Any:
    """Create a subclass that accepts any video processor, and parts that are left out; transformers
    rejects foreign classes and None.
    """

    class Unchecked(processor_class):  # type: ignore[misc]
        """The processor class without the check."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            if name == "video_processor" or argument is None:
                return None
            return super().check_argument_for_proper_class(name, argument)

    Unchecked.__name__ = processor_class.__name__
    return Unchecked


def _class_of(model_type: str, name: str) -> Any:
    """Import a class from the module that defines it.

    transformers itself hides some classes behind torchvision although they work without it.
    """
    folder = model_type.replace("-", "_")
    path = f"transformers.models.{folder}.processing_{folder}"
    if find_spec(f"transformers.models.{folder}") is None or find_spec(path) is None:
        return None
    return getattr(import_module(path), name, None)
