"""Media family of MiniCPM-V: images and videos in slices, each image preceded by its number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm_media import Media, MediaFamily, Processed, Sound

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["CanvasFamily", "MiniCPMOFamily", "MiniCPMV2Family", "MiniCPMVFamily"]

_SLICES = "transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6"
#: The placeholder of MiniCPM-V 2, which published prompts put in parentheses.
_MARK = "<image>./</image>"
#: The placeholder of a sound in MiniCPM-o, in parentheses, too.
_SOUND = "<audio>./</audio>"

#: Patches of a token where squares are not merged inside the encoder.
_FINE = 4


class MiniCPMVFamily(MediaFamily):
    """MiniCPM-V 4.6."""

    kinds = ("image", "video")

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The processor's output without the image number, which `complete_prompt` writes."""
        if "use_image_id" in options:
            raise ValueError("use_image_id: the checkpoint says whether images have numbers")
        return super().call(media, {**options, "use_image_id": False})

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        if not self.processor.default_use_image_id:
            return tokens
        tokenizer = self.processor.tokenizer
        opens, closes = tokenizer.image_id_start_token, tokenizer.image_id_end_token
        # Filled placeholders begin or continue with one of these tokens.
        image_start = tokenizer.convert_tokens_to_ids(tokenizer.image_start_token)
        inside = {
            image_start,
            tokenizer.convert_tokens_to_ids(tokenizer.slice_start_token),
            int(mark[0]),
        }
        closed = tokenizer.convert_tokens_to_ids(closes)
        pieces, last, count = [], 0, 0
        for at in np.flatnonzero(tokens == mark[0]).tolist():
            before = int(tokens[at - 1]) if at else -1
            if before not in inside | {closed}:
                number = tokenizer.encode(f"{opens}{count}{closes}", add_special_tokens=False)
                pieces += [tokens[last:at], np.array(number, dtype=np.int64)]
                last = at
            count += before not in inside - {image_start}
        return np.concatenate([*pieces, tokens[last:]])


class CanvasFamily(MiniCPMVFamily):
    """MiniCPM-V 4.7: tokens of slices have the positions of what they show in the whole image."""

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        """Only images have numbers."""
        if int(mark[0]) == self.processor.video_token_id:
            return tokens
        return super().complete_prompt(tokens, mark)

    @cached_property
    def _counts(self) -> Callable[..., Any]:
        """transformers' function for positions, which needs the settings and no weights."""
        from torch.nn import Module
        from transformers import MiniCPMV4_7Config, MiniCPMV4_7Model

        class Positions(MiniCPMV4_7Model):  # type: ignore[misc]
            """The model without layers."""

            def __init__(self, settings: MiniCPMV4_7Config) -> None:
                Module.__init__(self)
                self.config = settings

        counts: Callable[..., Any] = Positions(
            MiniCPMV4_7Config.from_dict(dict(self.config))
        ).get_rope_index
        return counts

    def positions(
        self, tokens: np.ndarray, items: Sequence[tuple[int, Processed]]
    ) -> np.ndarray | None:
        import torch

        kinds = self.processor.create_mm_token_type_ids([tokens.tolist()])
        grids: dict[str, list[np.ndarray]] = {"target_sizes": [], "target_sizes_videos": []}
        is_fine = False
        for _, item in items:
            name = "target_sizes_videos" if item.kind == "video" else "target_sizes"
            sizes = item.tensors[name].reshape(-1, 2)
            grids[name].append(sizes)
            is_fine |= int(sizes.prod(axis=1).sum()) == _FINE * int(item.embedded.sum())
        sizes_by_kind = {
            name: torch.from_numpy(np.concatenate(sizes)) for name, sizes in grids.items() if sizes
        }
        positions, _ = self._counts(
            torch.from_numpy(tokens)[None],
            mm_token_type_ids=torch.tensor(kinds),
            downsample_mode="4x" if is_fine else "16x",
            **sizes_by_kind,
        )
        return np.asarray(positions[:, 0])


class _Slices:
    """The image processor beside a tokenizer. count: tokens of a slice. old: whether slices are
    between the tokens of images, as in 2.5.
    """

    def __init__(self, images: Any, tokenizer: Any, count: int, old: bool) -> None:
        self.images, self.tokenizer, self.count, self.old = images, tokenizer, count, old
        self.unknown = tokenizer.unk_token or "<unk>"
        self.feature_extractor: Any = None

    def placeholder(self, rows: int, columns: int) -> str:
        """Text for an image and its slices, without the image's number."""
        inside = self.unknown * self.count
        whole = f"<image>{inside}</image>"
        if not rows:
            return whole
        one = whole if self.old else f"<slice>{inside}</slice>"
        lines = "\n".join([one * columns] * rows)
        return f"{whole}<slice>{lines}</slice>" if self.old else f"{whole}{lines}"


class MiniCPMV2Family(MediaFamily):
    """MiniCPM-V 2.5 to 4.5: images in slices, each with as many tokens as there are queries."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        config, written = files.table("config"), files.settings("image_processor")
        tokenizer = files.part("tokenizer")
        for token in ("<image>", "</image>", "<slice>", "</slice>"):
            number = tokenizer.convert_tokens_to_ids(token)
            if number is None or number == tokenizer.unk_token_id:
                raise ValueError(f"its tokenizer has no token {token}")
        settings = {**(config.get("slice_config") or {}), **written}
        names = ("max_slice_nums", "scale_resolution", "patch_size", "image_mean", "image_std")
        known = {name: settings[name] for name in names if name in settings}
        for older, name in (("norm_mean", "image_mean"), ("norm_std", "image_std")):
            known.setdefault(name, list(settings.get(older) or [0.5, 0.5, 0.5]))
        base = import_module(_SLICES).MiniCPMV4_6ImageProcessorPil

        class Whole(base):  # type: ignore[misc, valid-type]
            """Slices of whole patches, of which none are merged."""

            def find_best_resize(
                self, image_size: Any, scale_resolution: int, patch_size: int, **more: Any
            ) -> Any:
                one = {**more, "downsample_mode": "4x"}
                # Half a patch twice is one.
                best = super().find_best_resize(image_size, scale_resolution, patch_size / 2, **one)
                return tuple(int(length) for length in best)

        old = str(config.get("version")) == "2.5"
        return _Slices(Whole(**known), tokenizer, int(config.get("query_num", 64)), old)

    def mark(self, kind: str) -> str:
        return _MARK

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.processor.tokenizer.convert_tokens_to_ids(self.processor.unknown)),)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if set(options) - {"max_slice_nums"}:
            raise ValueError(f"{', '.join(options)}: not supported yet, only max_slice_nums")
        reader = self.processor
        outputs = reader.images(images=[media.value], return_tensors="pt", **options)
        ((rows, columns),) = outputs["grids"]
        text = reader.placeholder(int(rows), int(columns))
        ids = reader.tokenizer([text], add_special_tokens=False)["input_ids"]
        pixels = {name: outputs[name] for name in ("pixel_values", "target_sizes")}
        return {**pixels, "input_ids": ids}

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        """Parentheses around placeholders are left out, and images get numbers from 2.6 on."""
        return self.open_placeholders(tokens, mark, numbered=not self.processor.old)

    def open_placeholders(
        self, tokens: np.ndarray, mark: np.ndarray, *, numbered: bool
    ) -> np.ndarray:
        """The prompt without parentheses around placeholders; numbered: with their numbers."""
        reader = self.processor
        encode, decode = reader.tokenizer.encode, reader.tokenizer.decode
        left, size, at, count = tokens.tolist(), len(mark), 0, 0
        while at <= len(left) - size:
            if left[at : at + size] != mark.tolist():
                at += 1
                continue
            before = decode(left[at - 1 : at]) if at else ""
            after = decode(left[at + size : at + size + 1])
            if before.endswith("(") and after.startswith(")"):
                rest = encode(after[1:], add_special_tokens=False) if after[1:] else []
                left[at + size : at + size + 1] = rest
                start = encode(before[:-1], add_special_tokens=False) if before[:-1] else []
                left[at - 1 : at] = start
                at += len(start) - 1
            if numbered:
                number = encode(f"<image_id>{count}</image_id>", add_special_tokens=False)
                left[at:at] = number
                at += len(number)
            count += 1
            at += size
        return np.array(left, dtype=np.int64)


class MiniCPMOFamily(MiniCPMV2Family):
    """MiniCPM-o 2.6: the tokens of each second of a sound are between tokens of their own."""

    kinds = ("image", "audio")

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from transformers import WhisperFeatureExtractor

        reader, written = super().open_processor(files), files.settings("feature_extractor")
        audio = files.table("config").get("audio_config") or {}
        settings = {"feature_size": int(audio.get("num_mel_bins", 80)), "chunk_length": 30}
        known = ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft")
        settings |= {key: written[key] for key in known if key in written}
        reader.feature_extractor = WhisperFeatureExtractor(**settings)
        return reader

    def mark(self, kind: str) -> str:
        return _SOUND if kind == "audio" else super().mark(kind)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(media.value, Sound):
            return super().call(media, options)
        if options:
            raise ValueError(f"{', '.join(options)}: not supported yet for sounds")
        reader, extractor = self.processor, self.processor.feature_extractor
        samples = media.value.at(self.rate).samples
        starts = range(0, len(samples), extractor.n_samples)
        outputs = extractor(
            [samples[start : start + extractor.n_samples] for start in starts],
            sampling_rate=self.rate, return_attention_mask=True, return_tensors="np",
        )  # fmt: skip
        frames = outputs["attention_mask"].sum(1)
        step = int(self.config.get("audio_pool_step", 2))
        count = sum(int((n - 1) // 2 + 1) // step for n in frames)
        if not count:
            raise ValueError(f"{len(samples)} samples are less than one token")
        chunk = (int(float(self.config.get("audio_chunk_length", 1.0)) * 100) - 1) // 2 + 1
        most = max(chunk // step, 1)
        text = "".join(
            f"<|audio_start|>{reader.unknown * min(most, count - first)}<|audio_end|>"
            for first in range(0, count, most)
        )
        parts = [mel[:, :n] for mel, n in zip(outputs["input_features"], frames, strict=True)]
        return {
            "input_ids": reader.tokenizer([text], add_special_tokens=False)["input_ids"],
            "audio_features": np.concatenate(parts, axis=1),
            "audio_feature_lens": frames.astype(np.int64),
        }

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        sound = self.processor.tokenizer.encode(_SOUND, add_special_tokens=False)
        if mark.tolist() == sound:
            return self.open_placeholders(tokens, mark, numbered=False)
        return super().complete_prompt(tokens, mark)
