"""Media families of Nemotron 3 Omni, with images of any size, videos and sounds, and Nemotron Nano
VL, with tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily, Sound, Video
from modulm_nemotron.tiles import TILES, fullest, nearest, open_reader

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["LlamaNanoVlFamily", "NanoVlFamily", "NemotronOmniFamily"]


#: Samples of two frames of a spectrogram, whose deviation sounds are divided by.
_LEAST = 320
_KIND = "NemotronH_Omni_Reasoning_V3"


class NemotronOmniFamily(MediaFamily):
    """Nemotron 3 Omni: transformers' processor, whatever code the files name.

    As in vLLM, no tokens of videos are dropped: `video_pruning_rate` of files is not used.
    """

    kinds = ("image", "video", "audio")

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from modulm_media.images import image_processor_class
        from modulm_media.video import video_processor_class

        config = files.table("config")
        parts = {
            "image_processor": image_processor_class(f"{_KIND}ImageProcessor").from_pretrained(
                files.path
            ),
            "tokenizer": files.part("tokenizer"),
        }
        films = video_processor_class(f"{_KIND}VideoProcessor")
        if files.settings("video_processor").get("norm_mean") and films is not None:
            parts["video_processor"] = films.from_pretrained(files.path)
        audio = config.get("audio_config") or config.get("sound_config")
        if audio:
            from transformers import ParakeetFeatureExtractor

            written = files.settings("feature_extractor")
            known = ("feature_size", "sampling_rate", "hop_length", "n_fft", "win_length")
            settings = {"feature_size": int(audio.get("num_mel_bins", 80))}
            settings |= {key: written[key] for key in known if key in written}
            parts["feature_extractor"] = ParakeetFeatureExtractor(**settings)
        processor = files.from_parts("nemotron_h_omni", f"{_KIND}Processor", parts)
        processor.video_temporal_patch_dim = int(config.get("video_temporal_patch_size", 2))
        processor.audio_subsampling_factor = int((audio or {}).get("subsampling_factor", 8))
        return processor

    def features(self, kind: str) -> Sequence[int]:
        """Frames of videos have the token of images."""
        sound = kind == "audio"
        return (int(self.processor.audio_token_id if sound else self.processor.image_token_id),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        from transformers.video_utils import VideoMetadata

        value = media.value
        if isinstance(value, Sound):
            if self.processor.feature_extractor is None:
                raise RequestError("this checkpoint has no encoder of audio", "multi_modal_data")
            if len(value.at(self.rate).samples) < _LEAST:
                raise ValueError(f"it has less than {_LEAST} samples")
        if not isinstance(value, Video):
            return super().call(media, options)
        if self.processor.video_processor is None:
            raise RequestError("this checkpoint has no settings for videos", "multi_modal_data")
        # transformers' processor writes the times of one video.
        outputs: Mapping[str, Any] = self.processor(
            text=[self.mark(media.kind)], videos=[value.frames], add_special_tokens=False,
            video_metadata=VideoMetadata(**value.metadata()), return_tensors="pt",
            **{"do_sample_frames": False, **options},
        )  # fmt: skip
        return outputs


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
