"""Falcon Mamba (arXiv 2410.05355): Mamba with weightless norms of step sizes, b and c."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder, RMSNorm
from modulm_mamba.mamba import MambaConfig, MambaForCausalLM, MixerLayer, mamba_mixer

__all__ = ["FalconMambaConfig", "FalconMambaForCausalLM", "FalconMambaLayer"]


@frozen(kw_only=True)
class FalconMambaConfig(MambaConfig):
    """config.json of Falcon Mamba."""

    mixer_rms_eps: float = 1e-6


class FalconMambaLayer(MixerLayer):
    """One layer of Falcon Mamba."""

    def __init__(self, c: FalconMambaConfig, b: Builder, index: int) -> None:
        norm = b.rms_norm("norm", c.hidden_size, c.rms_norm_eps)
        norms = [RMSNorm(b.ops, c.mixer_rms_eps) for _ in range(3)]
        super().__init__(norm, mamba_mixer(c, b.at("mixer"), norms), fp32=c.residual_in_fp32)


class FalconMambaForCausalLM(MambaForCausalLM):
    """Falcon Mamba with a language-model head."""

    config_type = FalconMambaConfig
    layer = FalconMambaLayer

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        names = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
        return {**super().tiny(), **names, "tie_word_embeddings": False}
