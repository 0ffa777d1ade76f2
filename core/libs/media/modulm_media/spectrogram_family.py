"""Sounds for encoders that read a spectrogram and halve its frames several times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import frozen

from modulm.errors import RequestError
from modulm_media.family import MediaFamily
from modulm_media.values import Media, Sound

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["SpectrogramFamily"]


@frozen(eq=False)
class _Processor:
    feature_extractor: Any


class SpectrogramFamily(MediaFamily):
    """A family whose `encoder_config` has `subsampling_factor`, a power of two.

    extractor: transformers' feature extractor. settings: its keys that are read from
    preprocessor_config.json.
    """

    kinds: ClassVar[tuple[str, ...]] = ("audio",)
    extractor: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = (
        "feature_size", "sampling_rate", "hop_length", "n_fft", "win_length", "preemphasis",
        "padding_value",
    )  # fmt: skip

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        import transformers

        written = files.settings("feature_extractor")
        settings = {key: written[key] for key in cls.settings if key in written}
        return _Processor(getattr(transformers, cls.extractor)(**settings))

    @property
    def encoder(self) -> Mapping[str, Any]:
        """`encoder_config` of config.json."""
        return self.config.get("encoder_config") or {}

    def sound(self, media: Media) -> Sound:
        """Return a sound at the model's rate. Raises RequestError for other media."""
        if not isinstance(media.value, Sound):
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        return media.value.at(self.rate)

    def spectrogram(self, sound: Sound, options: Mapping[str, Any]) -> tuple[np.ndarray, int]:
        """Return a spectrogram, [frames, bins] float32, and the number of the encoder's frames.

        Raises RequestError if the feature extractor refuses the sound.
        """
        try:
            heard = self.processor.feature_extractor(
                [sound.samples], sampling_rate=self.rate, return_tensors="np", **options
            )
        except Exception as error:
            message = f"the model's processor rejected this audio: {error}"
            raise RequestError(message[:300], "multi_modal_data") from error
        mel = heard["input_features"][0, : int(heard["attention_mask"].sum())]
        frames, factor = len(mel), int(self.encoder.get("subsampling_factor", 8))
        while factor > 1:
            frames, factor = (frames + 1) // 2, factor // 2
        return np.ascontiguousarray(mel, np.float32), frames
