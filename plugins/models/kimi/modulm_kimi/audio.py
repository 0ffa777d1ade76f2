"""Kimi-Audio (arXiv 2504.18425): Whisper's encoder before Qwen 2, four frames per token.

The checkpoint also reads codes of a speech tokenizer that it does not have. As in vLLM, the code of
an empty text stands for them, and the model writes but does not speak.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import PlainMLP, size
from modulm_towers import (
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    TextConfig,
    WhisperTower,
    WhisperTowerConfig,
    stacked,
    tiny_audio,
    tiny_text,
    zero_key_biases,
)

__all__ = ["KimiAudioConfig", "MoonshotKimiaForCausalLM"]

#: The folder of the encoder's files, frames of one token, and the published encoder.
_FOLDER, _MERGED = "whisper-large-v3", 4
_LARGE = {
    "num_mel_bins": 128, "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120, "max_source_positions": 1500,
}  # fmt: skip


@frozen(kw_only=True)
class _Keys:
    """kimia_adaptor_input_dim: numbers that one token is made of."""

    kimia_adaptor_input_dim: int = size(5120)


@frozen(eq=False, kw_only=True)
class KimiAudioConfig(MultimodalConfig):
    """config.json of Kimi-Audio: Qwen 2's keys. The encoder's are in a file of its own folder, or
    under `audio_config`.
    """

    audio_type: ClassVar[type | None] = WhisperTowerConfig
    top_level_type: ClassVar[type | None] = _Keys

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. Raises CheckpointError, UnsupportedError."""
        keys = read_config(dict(table), _Keys, file)
        audio = read_config(_encoder(table, file), WhisperTowerConfig, file)
        if keys.kimia_adaptor_input_dim != _MERGED * audio.d_model:
            raise CheckpointError(
                f"{file}: kimia_adaptor_input_dim: {keys.kimia_adaptor_input_dim}, not {_MERGED} "
                f"times the encoder's width {audio.d_model}"
            )
        if audio.max_source_positions % _MERGED:
            raise CheckpointError(f"{file}: max_source_positions: not a multiple of {_MERGED}")
        text = {key: value for key, value in table.items() if not key.startswith("kimia_")}
        text = {**text, "model_type": "qwen2"}
        config = TextConfig.from_table({**table, "text_config": text}, file)
        return cls(text=config, audio=audio, top_level=keys)


def _encoder(table: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """The encoder's settings."""
    if "audio_config" in table:
        if not isinstance(table["audio_config"], Mapping):
            raise CheckpointError(f"{file}: audio_config: must be a table")
        return dict(table["audio_config"])
    inner = Path(file).parent / _FOLDER / "config.json"
    if not inner.is_file():
        return _LARGE
    try:
        settings = json.loads(inner.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{inner}: is not JSON: {error}") from error
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{inner}: must be a table")
    return settings


class MoonshotKimiaForCausalLM(MultimodalModel):
    """Kimi-Audio 7B: it hears and writes."""

    api = 1
    config_type: ClassVar[type] = KimiAudioConfig
    media = ("audio",)
    names = WeightNames(
        ignore=(
            rf"^{_FOLDER}/(model\.decoder|proj_out)\.",
            r"^(model\.)?mimo_(layers|norm|output)\.",
        ),
        rewrite=(zero_key_biases(rf"^{_FOLDER}/model\.encoder\."),),
    )

    def make_encoders(self, config: KimiAudioConfig, b: Builder) -> None:
        hidden, at = config.hidden_size, b.at("model.vq_adaptor")
        self.tower = WhisperTower(config.audio, b.at(f"{_FOLDER}/model.encoder"))
        self.projector = PlainMLP(
            at, config.top_level.kimia_adaptor_input_dim, hidden, "silu",
            up="layers.0", down="layers.3", outputs=hidden,
        )  # fmt: skip
        self.norm = at.layer_norm("layers.4", hidden, config.text.text.rms_norm_eps)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        mel, windows = stacked(self, items, "input_features")
        states = yield from self.tower.run(mel)
        counts = [int(n) for item in items for n in item.tensors["counts"].reshape(-1)]
        whole_frames = [row[: _MERGED * n] for row, n in zip(states, counts, strict=True)]
        wide = torch.cat([row.reshape(len(row) // _MERGED, -1) for row in whole_frames])
        tokens: Tensor = self.norm(self.projector(wide))
        blank = torch.from_numpy(items[0].tensors["blank"].reshape(-1).copy()).to(self.device)
        tokens = (tokens + self.text.embeddings(blank).to(tokens.dtype)) * 2**0.5
        per_window = iter(counts)
        return tokens.split([sum(next(per_window) for _ in range(n)) for n in windows])

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            **tiny_text("qwen2"),
            "architectures": ["MoonshotKimiaForCausalLM"],
            "model_type": "kimi_audio",
            "tie_word_embeddings": False,
            "kimia_adaptor_input_dim": 128,
            "audio_config": tiny_audio("whisper", max_source_positions=100),
        }
