"""Media families of Idefics 3 and SmolVLM: tiles, labelled in the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["ColModernVBertFamily", "ColUltraVBertFamily", "IdeficsFamily", "SmolVLMFamily"]

_IMAGES = "transformers.models.idefics3.image_processing_pil_idefics3"
#: The image processor's settings that files have.
_SETTINGS = ("size", "max_image_size", "image_mean", "image_std", "do_image_splitting", "resample")


class IdeficsFamily(MediaFamily):
    """Idefics 3, SmolVLM."""

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        if not np.asarray(outputs.get("pixel_attention_mask", True)).all():
            raise RequestError(
                "not supported yet: images padded by the processor. Enable resizing instead.",
                "multi_modal_data",
            )
        return {"pixel_values": np.asarray(outputs["pixel_values"])}


class ColModernVBertFamily(IdeficsFamily):
    """ColModernVBERT."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        config = files.table("config")
        if "vlm_config" in config:
            return super().open_processor(files)
        # The merged files may name Idefics 3's processor, or code.
        parts = {name: files.part(name) for name in ("image_processor", "tokenizer")}
        processor = files.from_parts("colmodernvbert", "ColModernVBertProcessor", parts)
        vision, factor = config["vision_config"], int(config.get("pixel_shuffle_factor", 4))
        side = int(vision["image_size"]) // int(vision["patch_size"]) // factor
        processor.image_seq_len = side * side
        return processor

    def document(self, kind: str, is_only_item: bool) -> str:
        page: str = self.processor.visual_prompt_prefix
        return page if is_only_item else self.mark(kind)


class ColUltraVBertFamily(IdeficsFamily):
    """ColUltraVBERT: Idefics 3's tiles, of a smaller image where there would be too many."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        written, config = files.settings("image_processor"), files.table("config")
        settings = {name: written[name] for name in _SETTINGS if name in written}
        defaults = {"size": {"longest_edge": 3072}, "max_image_size": {"longest_edge": 512}}
        images = import_module(_IMAGES).Idefics3ImageProcessorPil(**{**defaults, **settings})
        parts = {"image_processor": images, "tokenizer": files.part("tokenizer")}
        processor = files.from_parts("idefics3", "Idefics3Processor", parts)
        vision, factor = config["vision_config"], int(config.get("pixel_shuffle_factor", 4))
        side = int(vision["image_size"]) // int(vision["patch_size"]) // factor
        processor.image_seq_len = side * side
        processor.max_image_tiles = int(written.get("max_image_tiles", 27))
        return processor

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        edge = self._edge(media.value.height, media.value.width)
        return super().call(media, {"size": {"longest_edge": edge}, **options})

    def _edge(self, height: int, width: int) -> int:
        """The longest edge at which an image has at most `max_image_tiles` tiles."""
        reader = self.processor.image_processor
        tile, edge = reader.max_image_size["longest_edge"], reader.size["longest_edge"]
        while edge > tile:
            sizes = {"size": {"longest_edge": edge}}
            _, rows, columns = reader.get_number_of_image_patches(height, width, sizes)
            if rows * columns <= self.processor.max_image_tiles:
                break
            edge -= tile
        return int(edge)


class SmolVLMFamily(IdeficsFamily):
    """SmolVLM accepts video: frames are images without tiles."""

    kinds = ("image", "video")

    def features(self, kind: str) -> Sequence[int]:
        return super().features("image")
