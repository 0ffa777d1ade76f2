"""Nanbeige 4.2 (Nanbeige Lab, 2026): Llama's layers, which run `num_loops` times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from modulm.nn import Builder
from modulm_layers import DecoderConfig, PreNormLayer, only, size, standard_mlp, tiny_config
from modulm_ouro.looped import LoopedAttention, LoopedForCausalLM

__all__ = ["NanbeigeConfig", "NanbeigeForCausalLM", "NanbeigeLayer"]


@frozen(kw_only=True)
class NanbeigeConfig(DecoderConfig):
    """config.json of Nanbeige 4.2. The final norm stands after each run as well, unless
    `skip_loop_final_norm`. The other keys are parts that no published checkpoint has.
    """

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(262144)
    num_loops: int = size(1)
    skip_loop_final_norm: bool = False
    qk_layernorm: bool = False
    enable_hyper_connection: bool = False
    enable_double_loop_split: bool = False
    enable_depth_attention: bool = False
    loop_share_kv: bool = False
    emb_neighbor_num: int | None = None
    loop_loss_weights: tuple[float, ...] | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            attention_bias=(False,),
            qk_layernorm=(False,),
            enable_hyper_connection=(False,),
            enable_double_loop_split=(False,),
            enable_depth_attention=(False,),
            loop_share_kv=(False,),
            emb_neighbor_num=(None,),
            loop_loss_weights=(None, ()),
        )


class NanbeigeLayer(PreNormLayer):
    """Llama's block."""

    def __init__(self, c: NanbeigeConfig, b: Builder, index: int) -> None:
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            LoopedAttention(c, b.at("self_attn"), index, c.num_loops),
            b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps),
            standard_mlp(c, b),
        )


class NanbeigeForCausalLM(LoopedForCausalLM):
    """Nanbeige 4.2 with a language-model head."""

    api = 1
    config_type = NanbeigeConfig
    layer = NanbeigeLayer
    loops_key = "num_loops"
    oracle = "modulm_ouro.oracle:AsLoopedLlama"

    @property
    def normed_between(self) -> bool:
        return not self.config.skip_loop_final_norm

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "nanbeige", "NanbeigeForCausalLM", num_hidden_layers=2, head_dim=24, num_loops=2
        )
