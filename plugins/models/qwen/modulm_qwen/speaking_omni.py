"""Qwen3-Omni with its talker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from attrs import evolve, frozen
from torch import Tensor

from modulm.errors import CheckpointError
from modulm.nn import Builder, read_config
from modulm_qwen.code2wav import Code2Wav, Code2WavConfig
from modulm_qwen.omni import Qwen3OmniConfig, Qwen3OmniThinker
from modulm_qwen.talker import Talker, TalkerConfig
from modulm_qwen.talking import Talking
from modulm_speakers.model import Choose, StateSource

__all__ = ["Qwen3Omni", "SpeakingOmniConfig"]

#: Keys of tokens, for tiny checkpoints.
_CODEC = (
    "codec_eos_token_id", "codec_nothink_id", "codec_think_bos_id", "codec_think_eos_id",
    "codec_pad_id", "codec_bos_id",
)  # fmt: skip
_SPOKEN = ("tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id")


@frozen(eq=False, kw_only=True)
class SpeakingOmniConfig(Qwen3OmniConfig):
    """config.json of Qwen3-Omni. talker, codec: None in checkpoints that only answer in text."""

    talker: TalkerConfig | None = None
    codec: Code2WavConfig | None = None

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        config = super().from_table(table, file)
        talker = table.get("talker_config")
        if not isinstance(talker, Mapping) or not table.get("enable_audio_output", True):
            return config
        codec = read_config(dict(table.get("code2wav_config") or {}), Code2WavConfig, file)
        config = evolve(config, talker=TalkerConfig.from_table(talker, file), codec=codec)
        config._check(file)
        return config

    def _check(self, file: str) -> None:
        talker, codec = self.talker, self.codec
        if talker is None or codec is None:
            return
        width, groups = talker.keys.thinker_hidden_size, talker.keys.num_code_groups
        for name, value, wanted in (
            ("talker_config: thinker_hidden_size", width, self.hidden_size),
            ("code2wav_config: num_quantizers", codec.num_quantizers, groups),
            ("code2wav_config: codebook_size", codec.codebook_size, talker.predictor.vocab_size),
        ):
            if value != wanted:
                raise CheckpointError(f"{file}: {name}: {value}, expected {wanted}")
        last = self.text.text.num_hidden_layers - 1
        for name, value, most in (
            ("hidden_size", talker.text.hidden_size, self.hidden_size),
            ("vocab_size", talker.text.vocab_size, self.vocab_size),
            ("accept_hidden_layer", talker.keys.accept_hidden_layer, last),
        ):
            if value > most:
                raise CheckpointError(f"{file}: talker_config: {name}: {value}, at most {most}")


class Qwen3Omni(Talking, Qwen3OmniThinker):
    """Qwen3-Omni."""

    config_type = SpeakingOmniConfig
    code2wav: Code2Wav

    def make_talker(self, config: SpeakingOmniConfig, b: Builder) -> None:
        talker, codec = config.talker, config.codec
        if talker is None or codec is None:
            raise CheckpointError("talker_config: missing")
        self.beside_text = StateSource(
            layer=talker.keys.accept_hidden_layer - 1, width=config.hidden_size
        )
        self.codebooks = talker.keys.num_code_groups
        self.codebook_size = talker.predictor.vocab_size
        self.first_codes, self.end = talker.text.vocab_size, talker.keys.codec_eos_token_id
        self.frame_samples = codec.frame_samples
        self.talker = Talker(talker, b.at("talker"))
        self.talker.embed.thinker = self.text.embeddings
        self.code2wav = Code2Wav(codec, b.at("code2wav"))

    def allowed(self, ids: Tensor) -> Tensor:
        return (ids < self.codebook_size) | (ids == self.end)

    def complete(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        frames: Tensor = self.talker.predictor(self.of_talker(hidden), first, choose)
        return frames

    def ends(self, frames: np.ndarray) -> np.ndarray:
        over: np.ndarray = frames[:, 0] == self.end
        return over

    def is_heard(self, frames: np.ndarray) -> np.ndarray:
        return ~self.ends(frames)

    def decode(
        self, frames: Tensor, states: Sequence[Any]
    ) -> tuple[Sequence[Tensor], Sequence[Any]]:
        sound: tuple[Sequence[Tensor], Sequence[Any]] = self.code2wav(frames, states)
        return sound

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        thinker = dict(super().tiny())
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        common = {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "head_dim": 8,
        }  # fmt: skip
        text = {
            **common, "vocab_size": 80, "moe_intermediate_size": 24, "num_experts": 4,
            "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True, "rope_parameters": rope,
        }  # fmt: skip
        talker = {
            "text_config": text,
            "code_predictor_config": {**common, "vocab_size": 64, "num_code_groups": 3},
            "num_code_groups": 3,
            "thinker_hidden_size": thinker["text_config"]["hidden_size"],
            "accept_hidden_layer": 2,
            "spatial_merge_size": 2,
            "speaker_id": {"ethan": 75, "chelsie": 76},
            **{name: 64 + index for index, name in enumerate(_CODEC)},
            **{name: value for name, value in thinker.items() if name.endswith("token_id")},
        }
        codec = {
            "codebook_size": 64, "hidden_size": 32, "num_attention_heads": 4,
            "num_key_value_heads": 4, "sliding_window": 6, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_quantizers": 3, "upsample_rates": [3, 2],
            "upsampling_ratios": [2, 2], "decoder_dim": 32,
        }  # fmt: skip
        return {
            "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
            "model_type": "qwen3_omni_moe",
            "thinker_config": thinker,
            "talker_config": talker,
            "code2wav_config": codec,
            "enable_audio_output": True,
            **{name: 500 + index for index, name in enumerate(_SPOKEN)},
            "im_start_token_id": 1,
            "im_end_token_id": 2,
        }
