"""Qwen2.5-Omni with its talker (arXiv 2503.20215).

The talker is a small Qwen 2 with one code per frame. It reads, at each position, a text token, the
thinker's state there, and a code. Sound comes once all codes are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import Builder, read_config
from modulm.nn.embedding import Head
from modulm_layers import DecoderForCausalLM, size
from modulm_qwen.bigvgan import BigVganConfig
from modulm_qwen.omni import OmniConfig, Qwen25OmniThinker
from modulm_qwen.qwen2 import Qwen2Config, Qwen2Layer
from modulm_qwen.talking import Talking
from modulm_qwen.token2wav import DiTConfig, Token2Wav, Voice
from modulm_speakers.model import CODES, GIVEN, STATES, TEXTS, Choose, StateSource

__all__ = ["VOICES", "Qwen25Omni", "SpeakingOmni25Config"]

#: The file of voices in a checkpoint.
VOICES = "spk_dict.pt"
_SEEDS = 1 << 62


@frozen(kw_only=True)
class Talker25Config(Qwen2Config):
    """`talker_config`."""

    vocab_size: int = size(8448)
    embedding_size: int = size(3584)
    head_dim: int | None = size(128)
    tts_codec_start_token_id: int = 8293
    tts_codec_end_token_id: int = 8294
    tts_codec_pad_token_id: int = 8292


@frozen(eq=False, kw_only=True)
class SpeakingOmni25Config(OmniConfig):
    """config.json of Qwen2.5-Omni. talker and the parts of the codec: None in checkpoints that only
    answer in text.
    """

    talker: Talker25Config | None = None
    dit: DiTConfig | None = None
    vocoder: BigVganConfig | None = None

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        config = super().from_table(table, file)
        talker = table.get("talker_config")
        if not isinstance(talker, Mapping) or not table.get("enable_audio_output", True):
            return config
        codec: Mapping[str, Any] = table.get("token2wav_config") or {}
        own = read_config(dict(talker), Talker25Config, file)
        for name, value, most in (
            ("embedding_size", own.embedding_size, config.hidden_size),
            ("hidden_size", own.hidden_size, config.hidden_size),
            ("vocab_size", own.vocab_size, config.vocab_size),
        ):
            if value > most or (name == "embedding_size" and value != most):
                raise CheckpointError(f"{file}: talker_config: {name}: {value}, expected {most}")
        return evolve(
            config,
            talker=own,
            dit=read_config(dict(codec.get("dit_config") or {}), DiTConfig, file),
            vocoder=read_config(dict(codec.get("bigvgan_config") or {}), BigVganConfig, file),
        )


class _Inputs(Module):
    """Adds up what stands at each position. thinker: embeds text tokens, [n] -> [n, width]."""

    thinker: Callable[[Tensor], Tensor]

    def __init__(self, c: Talker25Config, b: Builder, top: Builder) -> None:
        super().__init__()
        self.codes = b.embedding("embed_tokens", c.vocab_size, c.embedding_size)
        self.projection = top.linear(
            "thinker_to_talker_proj", c.embedding_size, c.hidden_size, bias=True, split=False
        )

    def forward(self, batch: Batch) -> Tensor:
        """Embed the tokens of rows that speak: [tokens, hidden]."""
        codes, texts = batch.extras[CODES][:, 0], batch.extras[TEXTS]
        x = torch.where((texts >= 0)[:, None], self.thinker(texts.clamp(min=0)), 0.0)
        if (states := batch.extras.get(STATES)) is not None:
            x = x + torch.where(batch.extras[GIVEN][:, None], states.to(x.dtype), 0.0)
        x = x + torch.where((codes >= 0)[:, None], self.codes.lookup(codes.clamp(min=0)), 0.0)
        projected: Tensor = self.projection(x)
        return projected


class Talker25(DecoderForCausalLM):
    """The decoder of codes."""

    api = 1
    layer = Qwen2Layer
    root: ClassVar[str] = "model"

    def make_embedding(self, config: Talker25Config, b: Builder) -> Any:
        return _Inputs(config, b, evolve(b, prefix=b.prefix.removesuffix(f".{self.root}")))

    def make_head(self, config: Talker25Config, b: Builder) -> Head:
        return b.head("codec_head", config.hidden_size, config.vocab_size)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        raise UnsupportedError(
            "a talker has no checkpoints of its own: use those of the model that it speaks for"
        )


@define(eq=False)
class _Sound:
    """A sound whose codes are collected. voice: its name. seed: of the noise."""

    voice: str
    seed: int
    codes: list[Tensor] = field(factory=list)


class Qwen25Omni(Talking, Qwen25OmniThinker):
    """Qwen2.5-Omni."""

    config_type = SpeakingOmni25Config
    flushes = True
    codebooks = 1

    def make_talker(self, config: SpeakingOmni25Config, b: Builder) -> None:
        if config.talker is None or config.dit is None or config.vocoder is None:
            raise CheckpointError("talker_config: missing")
        talker = config.talker
        self.beside_text = StateSource(layer=None, width=config.hidden_size)
        self.codebook_size, self.first_codes = config.dit.num_embeds + 1, talker.vocab_size
        self.over = (talker.tts_codec_pad_token_id, talker.tts_codec_end_token_id)
        self.talker = Talker25(talker, b.at("talker"))
        self.talker.embed.thinker = self.text.embeddings
        self.token2wav = Token2Wav(config.dit, config.vocoder, b.at("token2wav"))
        self.frame_samples = self.token2wav.frame_samples
        self._voices: dict[str, Voice] = {}

    def load(self, checkpoint: Path) -> bool:
        """Read the voices; the weights are loaded as those of other models."""
        if not self.speaks:
            return False
        file = checkpoint / VOICES
        if not file.is_file():
            raise CheckpointError(f"{file}: missing: it has the talker's voices")
        table = torch.load(file, map_location=self.device, weights_only=True)
        for name, voice in table.items():
            vector, mel = (voice[key].float() for key in ("cond", "ref_mel"))
            self._voices[name] = Voice(vector.reshape(1, -1), mel.reshape(1, *mel.shape[-2:]))
        return False

    def allowed(self, ids: Tensor) -> Tensor:
        first, last = self.over
        return (ids < self.codebook_size) | (ids == first) | (ids == last)

    def complete(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        return first[:, None]

    def ends(self, frames: np.ndarray) -> np.ndarray:
        return np.isin(frames[:, 0], self.over)

    def is_heard(self, frames: np.ndarray) -> np.ndarray:
        return ~self.ends(frames)

    def open_sound(self, voice: str, seed: int | None) -> _Sound:
        name = voice if voice in self._voices else next(iter(self._voices))
        return _Sound(name, int(torch.randint(_SEEDS, (1,))) if seed is None else seed)

    def decode(
        self, frames: Tensor, states: Sequence[_Sound]
    ) -> tuple[Sequence[Tensor], Sequence[_Sound]]:
        for sound, codes in zip(states, frames[..., 0], strict=True):
            sound.codes += codes.unbind()
        nothing = torch.zeros(0, device=frames.device)
        return [nothing] * len(states), states

    def flush(self, state: _Sound) -> Tensor:
        if not state.codes:
            return torch.zeros(0, device=self.device)
        generator = torch.Generator().manual_seed(state.seed)
        codes, state.codes = torch.stack(state.codes), []
        sound: Tensor = self.token2wav(codes, self._voices[state.voice], generator)
        return sound

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        thinker = dict(super().tiny())
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
        talker = {
            "vocab_size": 68, "embedding_size": thinker["text_config"]["hidden_size"],
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": 256, "rope_parameters": rope,
            "tts_text_start_token_id": 501, "tts_text_end_token_id": 502,
            "tts_text_pad_token_id": 500, "tts_codec_pad_token_id": 64,
            "tts_codec_start_token_id": 65, "tts_codec_end_token_id": 66,
            "tts_codec_mask_token_id": 67,
        }  # fmt: skip
        dit = {
            "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 16,
            "emb_dim": 12, "block_size": 6, "look_ahead_layers": [1], "look_backward_layers": [0],
            "num_embeds": 63, "mel_dim": 16, "enc_emb_dim": 8, "enc_dim": 12,
            "enc_channels": [16, 16, 16, 32], "enc_kernel_sizes": [5, 3, 3, 1],
            "enc_dilations": [1, 2, 3, 1], "enc_attention_channels": 8, "enc_se_channels": 8,
        }  # fmt: skip
        vocoder = {
            "mel_dim": 16, "upsample_initial_channel": 16, "resblock_kernel_sizes": [3, 5],
            "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]], "upsample_rates": [3, 2],
            "upsample_kernel_sizes": [7, 4],
        }  # fmt: skip
        return {
            "architectures": ["Qwen2_5OmniForConditionalGeneration"],
            "model_type": "qwen2_5_omni",
            "thinker_config": thinker,
            "talker_config": talker,
            "token2wav_config": {"dit_config": dit, "bigvgan_config": vocoder},
            "enable_audio_output": True,
        }
