"""Media families of Qwen-VL, Qwen-Omni and related models: positions count time, height and
width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import evolve, frozen

from modulm.errors import RequestError
from modulm_media import GridFamily, Media, MediaFamily, Processed, Sound, Video
from modulm_media.grids import pruned
from modulm_media.values import fingerprint, runs_of

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = [
    "AsrFamily",
    "ColQwen3Family",
    "ColQwenFamily",
    "Cosmos3EdgeFamily",
    "DotsOcrFamily",
    "ExaoneFamily",
    "HearingFamily",
    "InternS1ProFamily",
    "InternS2Family",
    "JinaFamily",
    "OmniFamily",
    "OpenCuaFamily",
    "Qwen3OmniFamily",
    "Qwen25VLFamily",
    "QwenVLFamily",
    "Tarsier2Family",
    "as_qwen2_vl",
]

#: Keywords for using the audio of videos: vLLM's, and transformers' own.
_WITH_SOUND = ("use_audio_in_video", "load_audio_from_video")


class QwenVLFamily(GridFamily):
    """Qwen2-VL, and Qwen3-VL, which writes the time before each frame."""

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        processed = super().process(media, options)
        rate = self.video_pruning_rate
        if not rate or processed.kind != "video" or len(processed.runs) != 1:
            return processed
        merge = int(self.config.get("vision_config", {}).get("spatial_merge_size", 2))
        return pruned(processed, rate, merge, self.pace(processed))

    def document(self, kind: str, is_only_item: bool) -> str:
        return _between(self.mark(kind))


class Cosmos3EdgeFamily(QwenVLFamily):
    """Cosmos 3 Edge, of images."""

    kinds = ("image",)


class InternS2Family(QwenVLFamily):
    """Intern-S2: Qwen3-VL's processor, whatever code the files name."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from modulm_media.video import video_processor_class

        parts = {name: files.part(name) for name in ("image_processor", "tokenizer")}
        video = video_processor_class("Qwen3VLVideoProcessor")
        parts["video_processor"] = None if video is None else video.from_pretrained(files.path)
        return files.from_parts("qwen3_vl", "Qwen3VLProcessor", parts)


class InternS1ProFamily(MediaFamily):
    """Intern-S1 Pro: Intern-S2's processor, and positions of one axis."""

    kinds = ("image", "video")

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        return InternS2Family.open_processor(files)

    def document(self, kind: str, is_only_item: bool) -> str:
        return _between(self.mark(kind))


def as_qwen2_vl(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json of Tarsier 2 with the keys of Qwen2-VL."""
    text = table.get("text_config") or {}
    vision = table.get("vision_config") or text.get("vision_config") or {}
    tokens = {
        key: table.get(key, text[key])
        for key in ("image_token_id", "video_token_id", "vision_start_token_id")
        if isinstance(table.get(key, text.get(key)), int)
    }
    return {
        **table,
        **tokens,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "text_config": {**text, "model_type": "qwen2_vl_text"},
        "vision_config": {**vision, "model_type": "qwen2_vl"},
    }


class Tarsier2Family(QwenVLFamily):
    """Tarsier 2: Qwen2-VL's processor, whatever code the files name."""

    video_processor = "Qwen2VLVideoProcessor"

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, as_qwen2_vl(config))

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from modulm_media.video import video_processor_class

        parts = {name: files.part(name) for name in ("image_processor", "tokenizer")}
        video = video_processor_class("Qwen2VLVideoProcessor")
        parts["video_processor"] = None if video is None else video.from_pretrained(files.path)
        return files.from_parts("qwen2_vl", "Qwen2VLProcessor", parts)


class ExaoneFamily(MediaFamily):
    """EXAONE 4.5: grids of patches, whose tokens are counted one after another."""

    kinds = ("image", "video")
    video_processor = "Qwen2VLVideoProcessor"


class DotsOcrFamily(MediaFamily):
    """dots.ocr: images, with Qwen2.5-VL's processor and a placeholder of its own."""

    #: The placeholder.
    token: ClassVar[str] = "<|imgpad|>"

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        tokenizer, token = files.part("tokenizer"), cls.token
        number = tokenizer.convert_tokens_to_ids(token)
        if number is None or number == tokenizer.unk_token_id:
            raise ValueError(f"its tokenizer has no token {token}")
        for name, value in (("image_token", token), ("image_token_id", number)):
            object.__setattr__(tokenizer, name, value)
        parts = {
            "image_processor": files.part("image_processor"),
            "tokenizer": tokenizer,
            "video_processor": None,
        }
        return files.from_parts("qwen2_5_vl", "Qwen2_5_VLProcessor", parts)

    def document(self, kind: str, is_only_item: bool) -> str:
        return f"<|img|>{self.mark(kind)}<|endofimg|>"


class OpenCuaFamily(DotsOcrFamily):
    """OpenCUA: images, with Qwen2-VL's patches and a placeholder of its own."""

    token = "<|media_placeholder|>"

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.image_token_id),)

    def document(self, kind: str, is_only_item: bool) -> str:
        return f"<|media_begin|>image<|media_content|>{self.mark(kind)}<|media_end|>"


class Qwen25VLFamily(QwenVLFamily):
    """Qwen2.5-VL: a position on the time axis is a fraction of a second."""

    video_processor = "Qwen2VLVideoProcessor"

    def pace(self, item: Processed) -> float:
        if "second_per_grid_ts" not in item.tensors:
            return 1.0
        each = int(self.config.get("vision_config", {}).get("tokens_per_second", 4))
        return each * float(item.tensors["second_per_grid_ts"].reshape(-1)[0])


class JinaFamily(Qwen25VLFamily):
    """Jina Embeddings v4."""

    kinds = ("image",)

    def document(self, kind: str, is_only_item: bool) -> str:
        page = super().document(kind, is_only_item)
        return f"<|im_start|>user\n{page}Describe the image.<|im_end|>\n" if is_only_item else page


class HearingFamily(MediaFamily):
    """Qwen2-Audio, Audio Flamingo 3 and Music Flamingo."""

    kinds = ("audio",)


class AsrFamily(HearingFamily):
    """Qwen3-ASR."""

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config.get("thinker_config", config))


@frozen(eq=False)
class _Film(Video):
    """A video with its audio."""

    sound: Sound | None = None


class OmniFamily(QwenVLFamily):
    """Qwen2.5-Omni.

    Sound advances positions like text, an image takes no time, and a video advances by its
    duration. With `use_audio_in_video`, the first sounds of a prompt belong to its videos, and
    their tokens are interleaved with the frames.
    """

    kinds = ("image", "video", "audio")
    video_processor = "Qwen2VLVideoProcessor"
    #: Positions per second.
    rhythm: ClassVar[float] = 25
    #: Whether the two tokens before a video with sound share one position, and the two after it.
    twins: ClassVar[bool] = True

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config.get("thinker_config", config))

    def features(self, kind: str) -> Sequence[int]:
        tokens = super().features(kind)
        return (*tokens, *super().features("audio")) if kind == "video" else tokens

    def group_media(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, Sequence[Media]]:
        if not any(options.get(name) for name in _WITH_SOUND):
            return tokens, media
        videos = [one for one in media if one.kind == "video"]
        sounds = [one for one in media if one.kind == "audio"]
        if len(sounds) < len(videos):
            message = f"use_audio_in_video: {len(videos)} videos and {len(sounds)} sounds"
            raise RequestError(message, "multi_modal_data")
        films = [_with_sound(*pair) for pair in zip(videos, sounds, strict=False)]
        rest = [one for one in media if one.kind == "image"] + sounds[len(videos) :]
        return self._without_marks(tokens, len(sounds), len(videos)), [*films, *rest]

    def needs_values(self, options: Mapping[str, Any]) -> bool:
        return any(options.get(name) for name in _WITH_SOUND)

    def _without_marks(self, tokens: np.ndarray, sounds: int, less: int) -> np.ndarray:
        """Remove the placeholders of the first sounds, if all sounds have one."""
        (mark,) = self.features("audio")
        ends = [self.config.get(f"audio_{end}_token_id") for end in ("start", "end")]
        inside = np.flatnonzero(tokens == mark)
        if len(inside) != sounds:
            return tokens
        drop = [
            index
            for at in inside[:less]
            for index, known in zip((at - 1, at, at + 1), (ends[0], mark, ends[1]), strict=True)
            if 0 <= index < len(tokens) and tokens[index] == known
        ]
        return np.delete(tokens, drop)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        options = {name: value for name, value in options.items() if name not in _WITH_SOUND}
        if not isinstance(media.value, _Film) or media.value.sound is None:
            return super().call(media, options)
        more = {
            "audio": [media.value.sound.at(self.rate).samples],
            "sampling_rate": self.rate,
            "audio_from_video_indices": [0],
            "load_audio_from_video": True,
        }
        return super().call(media, {**more, **options})

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        processed = super().process(media, options)
        if not isinstance(media.value, _Film):
            return processed
        heard = processed.tokens[processed.embedded] == super().features("audio")[0]
        return evolve(processed, tensors={**processed.tensors, "heard": heard})

    def positions(
        self, tokens: np.ndarray, items: Sequence[tuple[int, Processed]]
    ) -> np.ndarray | None:
        seen = [(first, item) for first, item in items if item.kind != "audio"]
        if not seen:
            return None
        filled = np.zeros((3, len(tokens)), dtype=np.int64)
        at = position = 0
        for start, item in seen:
            ((first, end),) = item.runs
            first, end = start + first, start + end
            filled[:, at:first] = position + np.arange(first - at)
            position += first - at
            twins = self.twins and "heard" in item.tensors
            if twins:
                position -= 1
                filled[:, first - 1] -= 1
            item_positions, last = self._item_positions(item)
            filled[:, first:end] = position + item_positions
            position, at = position + last + 1, end
            if twins:
                filled[:, end], at = position, end + 1
        filled[:, at:] = position + np.arange(len(tokens) - at)
        return filled

    def _item_positions(self, item: Processed) -> tuple[np.ndarray, int]:
        """([3, tokens] positions of an image or video relative to its start, the largest position
        of the final frames or of the audio).
        """
        merge = int(self.config.get("vision_config", {}).get("spatial_merge_size", 2))
        ((frames, rows, columns),) = item.tensors[f"{item.kind}_grid_thw"].tolist()
        shape = (frames, rows // merge, columns // merge)
        grid = np.indices(shape).reshape(3, -1)
        if item.kind == "video":
            each = np.float32(item.tensors["video_second_per_grid"].reshape(-1)[0])
            rhythm = np.float32(self.config.get("position_id_per_seconds", self.rhythm))
            grid[0] = (grid[0].astype(np.float32) * each * rhythm).astype(np.int64)
        heard = item.tensors.get("heard")
        if heard is None:
            return grid, int(grid.max())
        positions_ = np.zeros((3, len(heard)), dtype=np.int64)
        positions_[:, ~heard] = grid
        positions_[:, heard] = np.arange(int(heard.sum()))
        first = runs_of(heard == heard[-1])[-1][0]
        return positions_, int(positions_[:, first:].max())


class Qwen3OmniFamily(OmniFamily):
    """Qwen3-Omni.

    Positions are integers here, while transformers uses fractions for an `fps` that does not divide
    26.
    """

    rhythm = 13
    twins = False


def _with_sound(video: Media, sound: Media) -> Media:
    """Combine a video and its audio into one item; without a value if either has none."""
    value, heard, name = video.value, sound.value, fingerprint(video.hash, sound.hash)
    if not isinstance(value, Video) or not isinstance(heard, Sound):
        return Media("video", None, video.uuid or sound.uuid, name)
    film = _Film(value.frames, value.fps, value.indices, value.total, heard)
    return Media("video", film, video.uuid, name)


class ColQwenFamily(MediaFamily):
    """ColQwen2. Calls only the image part of its processor, which takes images without text."""

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.image_token_id),)

    def document(self, kind: str, is_only_item: bool) -> str:
        page: str = self.processor.visual_prompt_prefix
        return page if is_only_item else _between(self.mark(kind))

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        reader = self.processor.image_processor
        outputs = reader(images=[media.value], return_tensors="pt", **options)
        count = int(outputs["image_grid_thw"].prod()) // reader.merge_size**2
        return {**outputs, "input_ids": [list(self.features(media.kind)) * count]}


class ColQwen3Family(QwenVLFamily):
    """ColQwen 3 and 3.5: images, with Qwen3-VL's processor whatever code the files name."""

    kinds = ("image",)

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, {**config, **config.get("vlm_config", {})})

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        parts = {name: files.part(name) for name in ("image_processor", "tokenizer")}
        parts["video_processor"] = None
        return files.from_parts("qwen3_vl", "Qwen3VLProcessor", parts)

    def document(self, kind: str, is_only_item: bool) -> str:
        page = super().document(kind, is_only_item)
        ending = "Describe the image.<|im_end|><|endoftext|>"
        return f"<|im_start|>user\n{page}{ending}" if is_only_item else page


def _between(mark: str) -> str:
    return f"<|vision_start|>{mark}<|vision_end|>"
