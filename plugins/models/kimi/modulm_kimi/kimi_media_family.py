"""Media families of Kimi-VL, Kimi K2.5 and Kimi-Audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from modulm.errors import RequestError
from modulm_kimi.processor import open_processor
from modulm_media import Media, MediaFamily, Sound

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["KimiAudioFamily", "KimiK25Family", "KimiVLFamily"]

#: The folder of Kimi-Audio's encoder, what stands for a sound in a prompt, and samples of a token.
_WHISPER, _BLANK, _SAMPLES = "whisper-large-v3", "<|im_kimia_text_blank|>", 1280


class KimiVLFamily(MediaFamily):
    """Kimi-VL: uses the processor's output unchanged."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        return open_processor(files)


class KimiK25Family(KimiVLFamily):
    """Kimi K2.5: a video is a sequence of short clips, each preceded by its time."""

    kinds = ("image", "video")

    def features(self, kind: str) -> Sequence[int]:
        """A video token outside of the vocabulary is replaced by the image token."""
        tokens = super().features(kind)
        vocabulary = self.config.get("text_config", {}).get("vocab_size")
        return tokens if vocabulary is None or tokens[0] < vocabulary else super().features("image")

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        token = getattr(self.processor, f"{media.kind}_token_id")
        if token is None or token == self.processor.tokenizer.unk_token_id:
            raise ValueError(f"its tokenizer has no token {self.mark(media.kind)}")
        outputs = super().call(media, options)
        tokens = np.asarray(outputs["input_ids"])
        (feature_token,) = self.features(media.kind)
        return {**outputs, "input_ids": np.where(tokens == token, feature_token, tokens)}


@frozen(eq=False)
class Hearing:
    """The tokenizer and Whisper's feature extractor."""

    tokenizer: Any
    feature_extractor: Any


class KimiAudioFamily(MediaFamily):
    """Kimi-Audio: windows of 30 seconds, the last filled with silence."""

    kinds = ("audio",)

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from transformers import WhisperFeatureExtractor

        written = files.table(f"{_WHISPER}/preprocessor_config")
        settings = {"feature_size": 128}
        known = ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft")
        settings |= {key: written[key] for key in known if key in written}
        return Hearing(files.part("tokenizer"), WhisperFeatureExtractor(**settings))

    def mark(self, kind: str) -> str:
        return _BLANK

    def document(self, kind: str, is_only_item: bool) -> str:
        return f"<|im_media_begin|>{_BLANK}<|im_media_end|>"

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.convert_tokens_to_ids(_BLANK)),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if options:
            raise ValueError(f"{', '.join(options)}: no such keyword")
        if not isinstance(media.value, Sound):
            raise RequestError(f"the model does not support {media.kind} input", "multi_modal_data")
        samples, extractor = media.value.at(self.rate).samples, self.processor.feature_extractor
        firsts = range(0, len(samples), extractor.n_samples)
        windows = [samples[first : first + extractor.n_samples] for first in firsts]
        counts = [(len(window) - 1) // _SAMPLES + 1 for window in windows]
        outputs = extractor(windows, sampling_rate=self.rate, return_tensors="np")
        token = self.features(media.kind)[0]
        return {
            "input_ids": [[token] * sum(counts)],
            "input_features": outputs["input_features"],
            "counts": np.array(counts, np.int64),
            "blank": np.array([token], np.int64),
        }
