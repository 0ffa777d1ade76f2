"""Granite Speech (arXiv 2505.08699): a conformer, and a Q-Former on windows of its frames."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames, read_config
from modulm_layers import size
from modulm_towers import (
    ConformerConfig,
    ConformerTower,
    MultimodalConfig,
    MultimodalModel,
    Pieces,
    QFormer,
    QFormerConfig,
    tiny_text,
)

__all__ = [
    "GraniteSpeechConfig",
    "GraniteSpeechForConditionalGeneration",
    "GraniteSpeechPlusForConditionalGeneration",
]

log = logging.getLogger("modulm.models")


@frozen(kw_only=True)
class _Keys:
    downsample_rate: int = size(5)
    window_size: int = size(15)
    has_lora_adapter: bool = True


@frozen(eq=False, kw_only=True)
class GraniteSpeechConfig(MultimodalConfig):
    """config.json of Granite Speech. queries: settings of the querying transformer."""

    audio_type: ClassVar[type | None] = ConformerConfig
    audio_key = "encoder_config"
    top_level_type: ClassVar[type | None] = _Keys

    queries: QFormerConfig

    @classmethod
    def more(cls, keys: Mapping[str, Any], file: str) -> dict[str, Any]:
        table = keys.get("projector_config")
        if not isinstance(table, Mapping):
            raise CheckpointError(f"{file}: projector_config: must be a table")
        return {"queries": read_config(table, QFormerConfig, file)}


class GraniteSpeechForConditionalGeneration(MultimodalModel):
    """Granite Speech. The LoRA adapter of some checkpoints, for prompts with audio, is loaded like
    any other.
    """

    api = 1
    config_type: ClassVar[type] = GraniteSpeechConfig
    media = ("audio",)
    names = WeightNames(
        rename=((r"^model\.(encoder|projector)\.", r"\1."),),
        ignore=(r"batch_norm\.num_batches_tracked$",),
    )
    queries: Tensor

    def make_encoders(self, config: Any, b: Builder) -> None:
        if config.top_level.has_lora_adapter:
            log.warning(
                "the checkpoint has an adapter for prompts with audio: pass its folder as "
                "--lora-modules, and its name in requests"
            )
        self.tower = ConformerTower(config.audio, b.at("encoder"))
        at, hidden = b.at("projector"), config.queries.hidden_size
        count = config.top_level.window_size // config.top_level.downsample_rate
        at.parameter("query", self, "queries", (1, count, hidden))
        self.reader = QFormer(config.queries, at.at("qformer"))
        self.projector = at.linear("linear", hidden, config.hidden_size, bias=True, split=False)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        window, windows = self.config.top_level.window_size, []
        for item in items:
            x = yield from self.tower.run(self.tensor(item, "input_features")[0])
            windows.append(F.pad(x, (0, 0, 0, -len(x) % window)).unflatten(0, (-1, window)))
        read = self.projector(self.reader(self.queries[0], torch.cat(windows)))
        return [part.flatten(0, 1) for part in torch.split(read, [len(one) for one in windows])]

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["GraniteSpeechForConditionalGeneration"],
            "model_type": "granite_speech",
            "audio_token_index": 480,
            "has_lora_adapter": False,
            "tie_word_embeddings": False,
            "window_size": 6,
            "downsample_rate": 3,
            "text_config": tiny_text("granite", embedding_multiplier=1.5),
            "encoder_config": {
                "model_type": "granite_speech_encoder",
                "input_dim": 16,
                "num_layers": 2,
                "hidden_dim": 32,
                "feedforward_mult": 2,
                "num_heads": 2,
                "output_dim": 12,
                "context_size": 8,
                "max_pos_emb": 12,
                "conv_kernel_size": 4,
            },
            "projector_config": {
                "model_type": "blip_2_qformer",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 48,
                "encoder_hidden_size": 32,
            },
        }


class GraniteSpeechPlusForConditionalGeneration(GraniteSpeechForConditionalGeneration):
    """Granite Speech Plus: the querying transformer reads several layers of the encoder."""

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = super().tiny()
        encoder = {"model_type": "granite_speech_plus_encoder", "cat_hidden_layers": [0, 1]}
        return {
            **table,
            "architectures": ["GraniteSpeechPlusForConditionalGeneration"],
            "model_type": "granite_speech_plus",
            "encoder_config": {**table["encoder_config"], **encoder},
            "projector_config": {**table["projector_config"], "encoder_hidden_size": 96},
        }
