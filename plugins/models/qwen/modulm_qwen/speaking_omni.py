"""Qwen3-Omni with its talker: answers in text, and rows that speak them, in one engine.

Rows of both kinds share steps. A step with one kind runs only that kind's layers; a mixed step runs
both over all its tokens, since small steps take as long as reading the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.model import Batch, CacheSpec
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_qwen.code2wav import Code2Wav, Code2WavConfig
from modulm_qwen.omni import Qwen3OmniConfig, Qwen3OmniThinker
from modulm_qwen.talker import Talker, TalkerConfig
from modulm_speakers.flags import SpeechConfig
from modulm_speakers.model import CODES, MIXED, Choose, SpeakingModel, StateSource

__all__ = ["Qwen3Omni", "SpeakingOmniConfig"]

_RATE = 24000
#: Keys of tokens, for tiny checkpoints.
_CODEC = (
    "codec_eos_token_id", "codec_nothink_id", "codec_think_bos_id", "codec_think_eos_id",
    "codec_pad_id", "codec_bos_id",
)  # fmt: skip
_SPOKEN = ("tts_pad_token_id", "tts_bos_token_id", "tts_eos_token_id")
#: What the thinker leaves out.
_PARTS = r"^(talker|token2wav|code2wav)\."


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


class Qwen3Omni(Qwen3OmniThinker, SpeakingModel):
    """Qwen3-Omni. It speaks with --enable-audio-output; without, it is only the thinker."""

    kit_not_run = ""
    config_type = SpeakingOmniConfig
    speaks = False

    def __init__(self, config: SpeakingOmniConfig, build: Builder) -> None:
        super().__init__(config, build)
        engine = build.shared.config
        wanted = engine is not None and engine.group(SpeechConfig).enable_audio_output
        if not wanted or self.only_encodes:
            return
        if config.talker is None or config.codec is None:
            raise CheckpointError(
                "enable_audio_output: this checkpoint has no talker: leave the flag out"
            )
        self.speaks, talker = True, config.talker
        self.beside_text = StateSource(
            layer=talker.keys.accept_hidden_layer - 1, width=config.hidden_size
        )
        self.codebooks, self.codebook_size = (
            talker.keys.num_code_groups,
            talker.predictor.vocab_size,
        )
        #: Size of the vocabulary of first codes.
        self.first_codes = talker.text.vocab_size
        self.rate, self.frame_samples = _RATE, config.codec.frame_samples
        # Adapters are of the thinker.
        apart = evolve(build, shared=evolve(build.shared, adapters=None))
        self.talker = Talker(talker, apart.at("talker"))
        self.talker.embed.thinker = self.text.embeddings
        self.code2wav = Code2Wav(config.codec, apart.at("code2wav"))
        self._speaking: Tensor | bool = False
        # The names depend on the flag, not only on the class.
        object.__setattr__(self, "weights", partial(_whole, type(self)))

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return self.talker.caches if self.speaks else super().caches

    def forward(self, batch: Batch) -> Tensor:
        return self._both(batch, super().forward)

    def states(self, batch: Batch, layers: Sequence[int]) -> tuple[Tensor, ...]:
        if CODES in batch.extras and MIXED not in batch.extras:
            spoken = self._spoken(batch)
            return (spoken,) * (1 + len(layers))
        inner: list[Tensor] = []

        def think(own: Batch) -> Tensor:
            hidden, *others = super(Qwen3Omni, self).states(own, layers)
            inner.extend(others)
            return hidden

        return (self._both(batch, think), *inner)

    def _both(self, batch: Batch, think: Any) -> Tensor:
        """Run the layers of the kinds of rows in the batch."""
        if CODES not in batch.extras:
            hidden: Tensor = think(batch)
            return hidden
        spoken, mixed = self._spoken(batch), batch.extras.get(MIXED)
        return spoken if mixed is None else torch.where(mixed[:, None], spoken, think(batch))

    def _spoken(self, batch: Batch) -> Tensor:
        """The talker's states, as wide as the thinker's: [tokens, hidden]."""
        hidden = self.talker(batch)
        return F.pad(hidden, (0, self.config.hidden_size - hidden.shape[1]))

    def focus(self, speaking: np.ndarray | None) -> None:
        if speaking is None or speaking.all():
            self._speaking = speaking is not None
        else:
            self._speaking = torch.from_numpy(speaking).to(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        speaking = self._speaking if self.speaks else False
        if speaking is False:
            return super().logits(hidden)
        keys, width = self.config.talker.keys, self.config.talker.text.hidden_size
        first = self.talker.first_logits(
            hidden[:, :width].contiguous(), self.codebook_size, keys.codec_eos_token_id
        )
        more = self.config.vocab_size - first.shape[1]
        spoken = F.pad(first, (0, more), value=-torch.inf)
        if speaking is True:
            return spoken
        texts = super().logits(hidden)
        return torch.where(speaking[:, None], spoken.to(texts.dtype), texts)

    def complete(self, hidden: Tensor, first: Tensor, choose: Choose) -> Tensor:
        width = self.config.talker.text.hidden_size
        frames: Tensor = self.talker.predictor(hidden[:, :width].contiguous(), first, choose)
        return frames

    def ends(self, frames: np.ndarray) -> np.ndarray:
        over: np.ndarray = frames[:, 0] == self.config.talker.keys.codec_eos_token_id
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


def _whole(driver: type[Qwen3Omni], config: SpeakingOmniConfig) -> WeightNames:
    """Names of all weights, those of the talker included."""
    names = driver.weights(config)
    left_out = tuple(pattern for pattern in names.ignore if pattern != _PARTS)
    return evolve(names, ignore=left_out)
