"""M2M100 (Fan et al., arXiv 2010.11125), NLLB (arXiv 2207.04672) and Marian (arXiv 1804.00344):
BART's shape with computed positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from modulm.nn import Builder, WeightNames
from modulm_bart.bart import BartConfig, BartForConditionalGeneration, Positions
from modulm_layers import only, size
from modulm_towers.whisper import sinusoids

__all__ = ["M2M100ForConditionalGeneration", "MarianMTModel"]

_COMPUTED = WeightNames(
    ignore=(r"(encoder|decoder)\.embed_(tokens|positions)\.", r"^lm_head\.", r"^final_logits_bias$")
)


@frozen(kw_only=True)
class M2M100Config(BartConfig):
    """config.json of M2M100 and NLLB."""

    pad_token_id: int = size(1, least=0)


class M2M100ForConditionalGeneration(BartForConditionalGeneration):
    """M2M100 and NLLB: pre-norm, with final norms. Positions start after the padding token's id."""

    config_type: ClassVar[type] = M2M100Config
    names = _COMPUTED
    before = last_norm = True
    embed_norm = biased = False

    def make_positions(self, config: Any, b: Builder) -> Positions:
        first = config.pad_token_id + 1
        return _placed(sinusoids(first + config.max_length, config.d_model)[first:], b)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "model_type": "m2m_100", "activation_function": "relu"}


@frozen(kw_only=True)
class MarianConfig(BartConfig):
    """config.json of Marian."""

    share_encoder_decoder_embeddings: bool = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, share_encoder_decoder_embeddings=(True,))


class MarianMTModel(BartForConditionalGeneration):
    """Marian: norms after the additions, none after the embedding."""

    config_type: ClassVar[type] = MarianConfig
    names = WeightNames(ignore=_COMPUTED.ignore[:2])
    embed_norm = False

    def make_positions(self, config: Any, b: Builder) -> Positions:
        width, count = config.d_model, config.max_length
        waves = 10000.0 ** (-torch.arange(0, width, 2).double() / width)
        angles = torch.arange(count)[:, None] * waves
        return _placed(torch.cat([angles.sin(), angles.cos()], dim=1), b)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {**super().tiny(), "model_type": "marian", "activation_function": "swish"}


def _placed(table: Tensor, b: Builder) -> Positions:
    return Positions(table.to(b.shared.device, b.shared.dtype))
