"""Media families of Llama 3.2 and 4, Mistral Small 3, LightOnOCR and Voxtral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Processed, Sound
from modulm_media.rows import RowsFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["Llama4Family", "MistralFamily", "MllamaFamily", "PixtralFamily", "VoxtralFamily"]

_PIXTRAL = "transformers.models.pixtral.image_processing_pil_pixtral"
#: Ids of Mistral's control tokens for an image, the end of a row of it, and its end.
_IMAGE_TOKENS = {"image_token_id": 10, "image_break_token_id": 12, "image_end_token_id": 13}


class MistralFamily(RowsFamily):
    """Uses the processor's output unchanged."""


@frozen(eq=False)
class _Rows:
    """What makes images rows of tokens. patch: pixels along a token; ids: of `_IMAGE_TOKENS`."""

    image_processor: Any
    patch: int
    ids: Mapping[str, int]


class PixtralFamily(MediaFamily):
    """Models that see, in Mistral's own format. Text cannot contain the placeholder: conversations
    and prompts of token ids do.
    """

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        vision = files.table("params").get("vision_encoder")
        vision = vision or files.table("config").get("vision_config") or {}
        patch = int(vision["patch_size"]) * int(vision.get("spatial_merge_size", 1))
        most = int(vision.get("max_image_size") or vision["image_size"])
        images = import_module(_PIXTRAL).PixtralImageProcessorPil(
            size={"longest_edge": most}, patch_size={"height": patch, "width": patch}
        )
        ids = {name: int(vision.get(name, usual)) for name, usual in _IMAGE_TOKENS.items()}
        return _Rows(images, patch, ids)

    def mark(self, kind: str) -> str:
        # Its frame tells `modulm-tokenizer-mistral` what is not a user's text.
        return "\ue004[IMG]\ue005"

    def mark_tokens(self, kind: str) -> Sequence[int]:
        return self.features(kind)

    def features(self, kind: str) -> Sequence[int]:
        return (self.processor.ids["image_token_id"],)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        processor = self.processor
        outputs = processor.image_processor(
            images=[media.value.convert("RGB")], return_tensors="pt", **options
        )
        height, width = (int(side) for side in np.asarray(outputs["image_sizes"]).reshape(-1))
        image, end_of_row, end = (processor.ids[name] for name in _IMAGE_TOKENS)
        rows = [*[image] * (width // processor.patch), end_of_row] * (height // processor.patch)
        return {**outputs, "input_ids": [[*rows[:-1], end]]}


class Llama4Family(MediaFamily):
    """Llama 4: tiles, with separator tokens that show their layout."""

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        return {"pixel_values": np.asarray(outputs["pixel_values"].float())}


class MllamaFamily(MediaFamily):
    """Llama 3.2 Vision: an image is one token; text from there on attends to its tiles."""

    looks = True

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        image = self.processor.image_processor
        outputs = image(images=[[media.value]], return_tensors="np", **options)
        tiles = int(outputs["aspect_ratio_mask"].sum())
        return {
            "input_ids": [self.features(media.kind)],
            "pixel_values": np.asarray(outputs["pixel_values"][0, 0, :tiles], np.float32),
            "aspect_ratio_ids": np.asarray(outputs["aspect_ratio_ids"][0, :1], np.int64),
        }

    def encoder_outputs(self, processed: Processed) -> int:
        tiles, _, height, width = processed.tensors["pixel_values"].shape
        size = self.config.get("vision_config", {}).get("patch_size", 14)
        return int(tiles * ((height // size) * (width // size) + 1))

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        """Insert the beginning-of-text token after leading images, if it is missing."""
        first = self.processor.tokenizer.bos_token_id
        if first is None or first in tokens:
            return tokens
        behind = np.flatnonzero(tokens != mark[0])
        return np.insert(tokens, int(behind[0]) if len(behind) else len(tokens), first)


class VoxtralFamily(MediaFamily):
    """Voxtral. Audio is padded to whole windows. Uses the feature extractor, since the processor
    accepts audio only in mistral-common's conversations.
    """

    kinds = ("audio",)

    def mark(self, kind: str) -> str:
        mark: str = self.processor.tokenizer.convert_ids_to_tokens(self.features(kind)[0])
        return mark

    def mark_tokens(self, kind: str) -> Sequence[int]:
        return self.features(kind)

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.config.get("audio_token_id") or self.processor.audio_token_id),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        sound, extractor = media.value, self.processor.feature_extractor
        if not isinstance(sound, Sound):
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        audio = self.config.get("audio_config", {})
        frames = 2 * int(audio.get("max_source_positions", 1500))
        outputs = extractor(
            sound.at(self.rate).samples, sampling_rate=self.rate, padding=True, truncation=False,
            pad_to_multiple_of=frames * extractor.hop_length, return_tensors="np", **options,
        )  # fmt: skip
        mel = outputs["input_features"][0]
        windows = mel.reshape(len(mel), -1, frames).transpose(1, 0, 2)
        numbers = len(windows) * frames // 2 * int(audio.get("hidden_size", 1280))
        count = numbers // int(audio.get("intermediate_size", 5120))
        return {"input_ids": [[self.features("audio")[0]] * count], "input_features": windows}
