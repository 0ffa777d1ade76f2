"""NVIDIA's Canary (arXiv 2509.14128): the layers of Cohere Transcribe with computed positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch
from modulm.errors import CheckpointError
from modulm.nn import Builder, Embedding, Norm, read_config
from modulm_cohere.asr import CohereAsrConfig, CohereAsrForConditionalGeneration, Decoder
from modulm_towers.parakeet import ParakeetConfig
from modulm_towers.text import complete_config

__all__ = ["CanaryConfig", "CanaryForConditionalGeneration"]

_EPS = 1e-5


@frozen(eq=False, kw_only=True)
class CanaryConfig(CohereAsrConfig):
    """config.json of Canary, with a table for the encoder and one for the decoder."""

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        known = complete_config("CanaryForConditionalGeneration", table, file)
        keys = table if known is None else known.to_dict()
        encoder, text = keys.get("encoder_config"), keys.get("decoder_config")
        for key, part in (("encoder_config", encoder), ("decoder_config", text)):
            if not isinstance(part, Mapping):
                raise CheckpointError(f"{file}: {key}: must be a table")
        tied = {"tie_word_embeddings": bool(keys.get("tie_word_embeddings", True))}
        decoder = read_config({**dict(text or {}), **tied}, Decoder, file)
        fields = {field: getattr(decoder, field) for field in Decoder.__annotations__}
        return cls(**fields, encoder=read_config(dict(encoder or {}), ParakeetConfig, file))


class _Placed(Module):
    """Tokens plus sines of their positions, normed."""

    def __init__(self, tokens: Embedding, norm: Norm, table: Tensor) -> None:
        super().__init__()
        self.tokens, self.norm = tokens, norm
        self.register_buffer("table", table, persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        """[tokens, hidden] for the batch's tokens."""
        x: Tensor = self.norm(self.tokens(batch) + self.get_buffer("table")[batch.positions])
        return x


def _sines(length: int, width: int) -> Tensor:
    """[length, width] float32: sines, then cosines, divided by the root of the width."""
    slowest = math.log(10000.0) * (width - 2) / width
    rates = torch.exp(torch.arange(width // 2) * (-slowest / (width // 2 - 1)))
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1) / math.sqrt(width)


class CanaryForConditionalGeneration(CohereAsrForConditionalGeneration):
    """The text decoder reads the encoder's frames without a projection."""

    config_type: ClassVar[type] = CanaryConfig

    def make_projector(self, config: Any, b: Builder) -> None:
        if config.encoder.hidden_size != config.hidden_size:
            raise CheckpointError(
                "encoder_config.hidden_size: must be that of decoder_config, "
                f"{config.hidden_size}, not {config.encoder.hidden_size}"
            )

    def make_embedding(self, config: Any, b: Builder) -> Any:
        tokens = b.embedding("embed_tokens", config.vocab_size, config.hidden_size)
        norm = b.layer_norm("embedding_layernorm", config.hidden_size, _EPS)
        table = _sines(config.max_position_embeddings, config.hidden_size)
        return _Placed(tokens, norm, table.to(b.shared.device, b.shared.dtype))

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        cohere = super().tiny()
        encoder = {**cohere["encoder_config"], "hidden_size": 64, "num_attention_heads": 4}
        names = (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "intermediate_size",
        )  # fmt: skip
        special = ("decoder_start_token_id", "eos_token_id", "bos_token_id", "pad_token_id")
        return {
            "architectures": [cls.__name__],
            "model_type": "canary",
            **{name: cohere[name] for name in ("vocab_size", *special)},
            "encoder_config": encoder,
            "decoder_config": {
                "model_type": "canary_decoder",
                **{name: cohere[name] for name in names},
                "max_position_embeddings": 192,
                "num_key_value_heads": 4,
                "head_dim": 16,
            },
        }
