"""Qwen2.5-Omni and Qwen3-Omni (arXiv 2503.20215, 2509.17765): the "thinker", without speech
output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.nn import Builder, WeightNames
from modulm_qwen.hearing import (
    OmniHearingConfig,
    Qwen3Hearing,
    Qwen3HearingConfig,
    Qwen25Hearing,
)
from modulm_qwen.vl import (
    Qwen3VLForConditionalGeneration,
    Qwen25VLForConditionalGeneration,
    QwenVLConfig,
)
from modulm_towers import Pieces, flat_patches, tiny_audio, tiny_text, zero_key_biases

__all__ = ["SPEAKING", "OmniConfig", "Qwen3OmniConfig", "Qwen3OmniThinker", "Qwen25OmniThinker"]

#: Weights of the talker and of its codec.
SPEAKING = r"^(talker|token2wav|code2wav)\."
_LEFT_OUT = (SPEAKING, r"^audio_tower\.audio_bos_eos_token\.")
#: Qwen3-Omni's names for parts of Qwen3-VL.
_MERGERS = (
    (r"^visual\.merger_list\.", "visual.deepstack_merger_list."),
    (r"^(visual\.(?:merger|deepstack_merger_list\.\d+))\.ln_q\.", r"\1.norm."),
    (r"^(visual\.(?:merger|deepstack_merger_list\.\d+))\.mlp\.0\.", r"\1.linear_fc1."),
    (r"^(visual\.(?:merger|deepstack_merger_list\.\d+))\.mlp\.2\.", r"\1.linear_fc2."),
)


@frozen(eq=False, kw_only=True)
class OmniConfig(QwenVLConfig):
    """config.json of the complete model, or of the thinker only."""

    audio_type: ClassVar[type | None] = OmniHearingConfig
    thinker: ClassVar[str] = "Qwen2_5OmniThinkerForConditionalGeneration"

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        inner = table.get("thinker_config", table)
        thinker_table = {"tie_word_embeddings": False, **inner, "architectures": [cls.thinker]}
        return super().from_table(thinker_table, file)


@frozen(eq=False, kw_only=True)
class Qwen3OmniConfig(OmniConfig):
    """config.json of Qwen3-Omni."""

    audio_type = Qwen3HearingConfig
    thinker = "Qwen3OmniMoeThinkerForConditionalGeneration"


class _Hears:
    """Mixin that adds audio to a vision model."""

    names: ClassVar[WeightNames]
    ears: Qwen25Hearing | Qwen3Hearing

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names: WeightNames = super().weights(config)  # type: ignore[misc]
        return evolve(names, rename=((r"^thinker\.", ""), *names.rename))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        heard = [item for item in items if "input_features" in item.tensors]
        seen = [item for item in items if item.kind != "audio"]
        video_features: dict[int, Tensor] = {}
        spoken: dict[int, Tensor] = {}
        if seen:
            frames = yield from super().features(seen)  # type: ignore[misc]
            video_features = {
                id(item): embeddings for item, embeddings in zip(seen, frames, strict=True)
            }
        if heard:
            sounds = yield from self.ears.hear([self._sound(item) for item in heard])
            spoken = {id(item): embeddings for item, embeddings in zip(heard, sounds, strict=True)}
        return [_woven(item, video_features.get(id(item)), spoken.get(id(item))) for item in items]

    def _sound(self, item: MediaItem) -> Tensor:
        """The unpadded [bins, frames] of a sound."""
        frames = int(item.tensors["feature_attention_mask"].sum())
        mel: Tensor = self.tensor(item, "input_features")  # type: ignore[attr-defined]
        return mel[0, :, :frames]


class Qwen25OmniThinker(_Hears, Qwen25VLForConditionalGeneration):
    """Qwen2.5-Omni."""

    prunes_videos = False
    config_type = OmniConfig
    media = ("image", "video", "audio")
    names = WeightNames(
        ignore=_LEFT_OUT, rewrite=(flat_patches(r"patch_embed\.proj\.weight$"), zero_key_biases())
    )

    def make_encoders(self, config: Any, b: Builder) -> None:
        super().make_encoders(config, b)
        self.ears = Qwen25Hearing(config.audio, b.at("audio_tower"))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        seen = super().tiny()
        return {
            **_tokens("index"),
            "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"],
            "model_type": "qwen2_5_omni_thinker",
            "text_config": {**seen["text_config"], "model_type": "qwen2_5_omni_text"},
            "vision_config": {
                **seen["vision_config"],
                "model_type": "qwen2_5_omni_vision_encoder",
            },
            "audio_config": tiny_audio("qwen2_5_omni_audio_encoder", n_window=12, output_dim=64),
        }


class Qwen3OmniThinker(_Hears, Qwen3VLForConditionalGeneration):
    """Qwen3-Omni, with experts."""

    config_type = Qwen3OmniConfig
    media = ("image", "video", "audio")
    names = WeightNames(
        rename=_MERGERS,
        ignore=_LEFT_OUT,
        rewrite=(flat_patches(r"patch_embed\.proj\.weight$"),),
    )

    def make_encoders(self, config: Any, b: Builder) -> None:
        super().make_encoders(config, b)
        self.ears = Qwen3Hearing(config.audio, b.at("audio_tower"))

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        levels = len(self.config.vision.deepstack_visual_indexes)
        wide = self.config.hidden_size * (1 + levels)
        embeddings = yield from super().features(items)
        return [
            F.pad(item_embeddings, (0, wide - item_embeddings.shape[1]))
            for item_embeddings in embeddings
        ]

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        seen = super().tiny()
        text = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "rope_parameters": dict(seen["text_config"]["rope_parameters"]),
        }
        return {
            **_tokens("id"),
            "architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"],
            "model_type": "qwen3_omni_moe_thinker",
            "text_config": tiny_text("qwen3_omni_moe_text", **text),
            "vision_config": {
                **seen["vision_config"],
                "model_type": "qwen3_omni_moe_vision_encoder",
            },
            "audio_config": tiny_audio(
                "qwen3_omni_moe_audio_encoder",
                n_window_infer=200,
                output_dim=64,
                downsample_hidden_size=8,
            ),
        }


def _woven(item: MediaItem, frames: Tensor | None, spoken: Tensor | None) -> Tensor:
    """Embeddings of an item's frames, its audio, or both interleaved (a video with audio)."""
    if frames is None or spoken is None:
        return torch.cat([part for part in (frames, spoken) if part is not None])
    heard = torch.from_numpy(np.array(item.tensors["heard"])).to(frames.device)
    woven = frames.new_zeros(len(heard), frames.shape[1])
    woven[~heard] = frames
    woven[heard] = F.pad(spoken, (0, frames.shape[1] - spoken.shape[1])).to(frames.dtype)
    return woven


def _tokens(ending: str) -> dict[str, Any]:
    """The special tokens of tiny checkpoints."""
    return {
        f"image_token_{ending}": 480,
        f"video_token_{ending}": 481,
        "vision_start_token_id": 482,
        "vision_end_token_id": 483,
        f"audio_token_{ending}": 484,
        "audio_start_token_id": 485,
        "audio_end_token_id": 486,
        "tie_word_embeddings": False,
    }
