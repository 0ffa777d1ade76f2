"""Media families of Gemma 4, in which tokens of an image may attend in both directions, and of
Gemma 3n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Processed, Sound

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["Gemma3nFamily", "Gemma4Family", "Gemma4UnifiedFamily"]


#: The encoder's inputs among the processor's outputs.
_INPUTS = (
    "pixel_values", "image_position_ids", "pixel_values_videos", "video_position_ids",
    "input_features", "input_features_mask",
)  # fmt: skip


class Gemma4Family(MediaFamily):
    """Gemma 4: images, and the frames of videos, each after its time."""

    kinds = ("image", "video")

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        text = config.get("text_config", {})
        self.bidirectional = text.get("use_bidirectional_attention") == "vision"
        self._window = int(text.get("sliding_window", 512))

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        processed = super().process(media, options)
        if media.kind == "audio":
            return evolve(processed, spans=())
        longest = max((end - first for first, end in processed.spans), default=0)
        if longest > self._window:
            raise RequestError(
                f"an image of {longest} tokens: windows are of {self._window}", "multi_modal_data"
            )
        return processed

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        return {name: np.asarray(outputs[name]) for name in _INPUTS if name in outputs}


class Gemma4UnifiedFamily(Gemma4Family):
    """Gemma 4 without encoders: images, videos and sounds."""

    kinds = ("image", "video", "audio")


#: Maximum number of line feeds that one token stands for, and seconds of a sound.
_LINES, _LONGEST = 31, 30


@frozen(eq=False)
class _Parts:
    """The tokenizer, transformers' feature extractor, and its image processor, None if the files
    have no settings of it.
    """

    tokenizer: Any
    feature_extractor: Any
    image_processor: Any


class Gemma3nFamily(MediaFamily):
    """Gemma 3n: images and sounds between blank lines, which merge with line feeds of the text."""

    kinds = ("image", "audio")

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from transformers import Gemma3nAudioFeatureExtractor

        written = files.settings("feature_extractor")
        known = (
            "feature_size", "sampling_rate", "frame_length_ms", "hop_length_ms", "min_frequency",
            "max_frequency", "preemphasis", "preemphasis_htk_flavor", "fft_overdrive",
            "input_scale_factor", "mel_floor", "per_bin_mean", "per_bin_stddev",
        )  # fmt: skip
        settings = {key: written[key] for key in known if key in written}
        images = files.settings("image_processor")
        sees = "image_processor_type" in images
        extractor = Gemma3nAudioFeatureExtractor(**settings)
        parts = files.part("tokenizer"), extractor
        return _Parts(*parts, files.part("image_processor") if sees else None)

    def _id(self, key: str, default: int) -> int:
        return int(self.config.get(key, default))

    def mark(self, kind: str) -> str:
        (number,) = self.mark_tokens(kind)
        token: str = self.processor.tokenizer.convert_ids_to_tokens(number)
        return token

    def mark_tokens(self, kind: str) -> Sequence[int]:
        sees = kind == "image"
        return (self._id(f"{kind}_token_id", 262145 if sees else 262273),)

    def features(self, kind: str) -> Sequence[int]:
        """The encoder also embeds the token after an item."""
        sees = kind == "image"
        end = self._id("eoi_token_id" if sees else "eoa_token_id", 262144 if sees else 262272)
        return (*self.mark_tokens(kind), end)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(media.value, Sound):
            begin = self._id("boa_token_id", 256000)
            inputs, count = self._heard(media.value, options), "audio_soft_tokens_per_image"
            return {"input_ids": self._filled("audio", begin, self._id(count, 188)), **inputs}
        processor = self.processor.image_processor
        if media.kind != "image" or processor is None:
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        outputs = processor(images=[media.value], return_tensors="pt", **options)
        begin, count = self._id("boi_token_id", 255999), "vision_soft_tokens_per_image"
        ids = self._filled("image", begin, self._id(count, 256))
        return {"input_ids": ids, "pixel_values": outputs["pixel_values"]}

    def _filled(self, kind: str, begin: int, count: int) -> list[list[int]]:
        """The tokens of an item."""
        lines = self.processor.tokenizer.encode("\n\n", add_special_tokens=False)
        soft, end = self.features(kind)
        return [[*lines, begin, *[soft] * count, end, *lines]]

    def _heard(self, value: Sound, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The encoder's inputs of a sound."""
        sound = value.at(self.rate)
        if sound.seconds > _LONGEST:
            raise ValueError(f"{sound.seconds:.1f} seconds: the model accepts {_LONGEST}")
        outputs = self.processor.feature_extractor(sound.samples, return_tensors="np", **options)
        if not outputs["input_features_mask"].any():
            raise ValueError("sound of less than a frame")
        return {
            "input_features": outputs["input_features"][0],
            "input_features_mask": outputs["input_features_mask"][0],
        }

    def merged_token(self, left: int, right: int) -> int | None:
        count = self._lines.get(left, 0), self._lines.get(right, 0)
        return self._tokens.get(sum(count)) if all(count) else None

    @cached_property
    def _tokens(self) -> Mapping[int, int]:
        """Number of line feeds -> their single token, if the vocabulary has one."""
        encode = self.processor.tokenizer.encode
        every = {n: encode("\n" * n, add_special_tokens=False) for n in range(1, _LINES + 1)}
        return {count: ids[0] for count, ids in every.items() if len(ids) == 1}

    @cached_property
    def _lines(self) -> Mapping[int, int]:
        return {token: count for count, token in self._tokens.items()}
