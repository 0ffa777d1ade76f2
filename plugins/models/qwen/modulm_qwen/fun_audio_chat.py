"""Fun-Audio-Chat (arXiv 2512.20156): Qwen2.5-Omni's encoder before Qwen 3, five frames per token.

The model also reads codes of a speech tokenizer, which is no part of the checkpoint. Where there
are none, each stands for the code of padding, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import only, size
from modulm_qwen.hearing import OmniHearingConfig, Qwen25Hearing
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    tiny_audio,
    tiny_text,
    zero_key_biases,
)

__all__ = ["FunAudioChatConfig", "FunAudioChatForConditionalGeneration"]


@frozen(kw_only=True)
class _HearingConfig(OmniHearingConfig):
    """`audio_config`. codebook_size, pad_token_id: of the speech tokenizer's codes. group_size:
    frames that one token is made of.
    """

    codebook_size: int = size()
    pad_token_id: int = size(least=0)
    group_size: int = size(5)
    continuous_features_mode: str = "replace"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, continuous_features_mode=("replace", "add"))
        if self.pad_token_id >= self.codebook_size:
            raise ValueError("pad_token_id: not below codebook_size")


@frozen(eq=False, kw_only=True)
class FunAudioChatConfig(MultimodalConfig):
    """config.json of Fun-Audio-Chat."""

    audio_type: ClassVar[type | None] = _HearingConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        audio = table.get(cls.audio_key)
        if not isinstance(audio, Mapping) or not isinstance(table.get("text_config"), Mapping):
            raise CheckpointError(f"{file}: text_config, {cls.audio_key}: must be tables")
        config = read_config(audio, _HearingConfig, file)
        text = TextConfig.from_table(table, file)
        if config.output_dim != text.text.hidden_size:
            raise CheckpointError(f"{file}: output_dim: {config.output_dim}, not the text's width")
        return cls(text=text, audio=config)


class FunAudioChatForConditionalGeneration(MultimodalModel):
    """Fun-Audio-Chat 8B: it hears and writes, and does not speak."""

    api = 1
    config_type: ClassVar[type] = FunAudioChatConfig
    media = ("audio",)
    names = WeightNames(
        ignore=(r"^audio_invert_tower\.", r"\.audio_bos_eos_token\."),
        rewrite=(zero_key_biases(r"^continuous_audio_tower\."),),
    )
    codes: Tensor

    def make_encoders(self, config: FunAudioChatConfig, b: Builder) -> None:
        c, at = config.audio, b.at("audio_tower")
        self.ears = Qwen25Hearing(c, b.at("continuous_audio_tower"))
        at.parameter("embed_tokens.weight", self, "codes", (c.codebook_size, c.output_dim))
        self.of_codes, self.of_frames = (
            at.linear(name, c.output_dim, c.output_dim, split=False)
            for name in ("output_matching", "continual_output_matching")
        )

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        c, sounds = self.config.audio, []
        for item in items:
            frames = int(item.tensors["feature_attention_mask"].sum())
            sounds.append(self.tensor(item, "input_features")[0, :, :frames])
        heard = yield from self.ears.hear(sounds)
        embeddings = []
        for item, x in zip(items, heard, strict=True):
            count = int(item.tensors["tokens"].reshape(-1)[0])
            whole = F.pad(x, (0, 0, 0, max(0, count * c.group_size - len(x))))
            groups = whole[: count * c.group_size].unflatten(0, (count, c.group_size))
            embeddings.append(self.of_frames(groups.mean(1)))
        if c.continuous_features_mode == "add":
            code = self.of_codes(self.codes[c.pad_token_id][None])
            embeddings = [part + code for part in embeddings]
        return embeddings

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        audio = tiny_audio(
            "funaudiochat_audio_encoder", n_window=10, output_dim=64, codebook_size=12,
            pad_token_id=11, group_size=5, continuous_features_mode="add",
        )  # fmt: skip
        return {
            "architectures": ["FunAudioChatForConditionalGeneration"],
            "model_type": "funaudiochat",
            "audio_token_index": 480,
            "text_config": {**tiny_text("qwen3", head_dim=16), "tie_word_embeddings": False},
            "audio_config": audio,
        }
