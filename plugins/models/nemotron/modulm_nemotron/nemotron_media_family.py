"""Media families of Nemotron 3 Omni, with images of any size, and Nemotron Nano VL, with tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modulm_media import Media, MediaFamily
from modulm_nemotron.tiles import TILES, fullest, nearest, open_reader

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["LlamaNanoVlFamily", "NanoVlFamily", "NemotronOmniFamily"]


class NemotronOmniFamily(MediaFamily):
    """Nemotron 3 Omni: transformers' processor, whatever code the files name."""

    kinds = ("image",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from modulm_media.images import image_processor_class

        kind = "NemotronH_Omni_Reasoning_V3"
        seen = image_processor_class(f"{kind}ImageProcessor").from_pretrained(files.path)
        parts = {"image_processor": seen, "tokenizer": files.part("tokenizer")}
        return files.from_parts("nemotron_h_omni", f"{kind}Processor", parts)

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.image_token_id),)


class NanoVlFamily(MediaFamily):
    """Nemotron Nano VL 2: tiles, in the layout of the nearest aspect ratio."""

    kinds = ("image",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        return open_reader(files, nearest)

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.image_token_id),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options:
            raise ValueError(f"{', '.join(options)}: not supported yet for this model")
        outputs: Mapping[str, Any] = self.processor(media.value)
        return outputs


class LlamaNanoVlFamily(NanoVlFamily):
    """Llama Nemotron Nano VL: tiles, as many as an image has pixels for."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written = files.table("preprocessor_config")
        most = int(written.get("max_num_tiles", TILES))
        return open_reader(files, fullest, most=most, in_bytes=True)
