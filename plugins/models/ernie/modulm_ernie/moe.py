"""ERNIE 4.5 with experts (Baidu, 2025; 21B-A3B, 300B-A47B): routing with a learned balance bias."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch import Tensor

from modulm.contracts.model import MtpLayer
from modulm.nn import Builder, Head, Rewrite, WeightNames
from modulm_ernie.ernie4_5 import ErnieConfig, ErnieLayer
from modulm_layers import (
    DecoderForCausalLM,
    ExpertNames,
    GatedMLP,
    MoE,
    Routing,
    size,
    standard_mlp,
    tiny_config,
)

__all__ = ["Ernie45MoeConfig", "Ernie45MoeForCausalLM", "Ernie45MoeLayer"]

_NAMES = ExpertNames(choice_bias="moe_statics.e_score_correction_bias")


@frozen(kw_only=True)
class Ernie45MoeConfig(ErnieConfig):
    """config.json of ERNIE 4.5 with experts, which are in every `moe_layer_interval`-th layer from
    `moe_layer_start_index` to `moe_layer_end_index`; -1 is the last one.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
    }

    moe_intermediate_size: int = size()
    moe_k: int = size(6)
    moe_num_experts: int = size(64)
    moe_num_shared_experts: int = size(2, least=0)
    moe_layer_start_index: int = size(1, least=0)
    moe_layer_end_index: int = size(-1, least=-1)
    moe_layer_interval: int = size(1)
    num_nextn_predict_layers: int = size(0, least=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.moe_k > self.moe_num_experts:
            raise ValueError(f"moe_k: {self.moe_k} of {self.moe_num_experts} experts")

    def sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        last = self.moe_layer_end_index
        if index < self.moe_layer_start_index or (last >= 0 and index > last):
            return False
        return (index + 1) % self.moe_layer_interval == 0


def _experts(c: Ernie45MoeConfig, b: Builder) -> MoE:
    shared = None
    if c.moe_num_shared_experts:
        inner = c.moe_num_shared_experts * c.moe_intermediate_size
        at = b.at("shared_experts")
        shared = GatedMLP(at, c.hidden_size, inner, c.hidden_act, bias=c.use_bias)
    return MoE(
        b,
        hidden=c.hidden_size,
        inner=c.moe_intermediate_size,
        experts=c.moe_num_experts,
        routing=Routing(c.moe_k),
        act=c.hidden_act,
        wide_router=True,
        choice_bias=True,
        shared=shared,
        names=_NAMES,
    )


class Ernie45MoeLayer(ErnieLayer):
    """One layer, with experts if it is sparse."""

    def __init__(self, c: Ernie45MoeConfig, b: Builder, index: int) -> None:
        dense = not c.sparse(index)
        mlp = standard_mlp(c, b, bias=c.use_bias) if dense else _experts(c, b.at("mlp"))
        super().__init__(c, b, index, mlp)


def _flat(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """[1, experts] -> [experts]."""
    yield name, tensor.flatten()


class Ernie45MoeForCausalLM(DecoderForCausalLM):
    """ERNIE 4.5 with experts and a language-model head; a layer without experts drafts tokens."""

    api = 1
    config_type = Ernie45MoeConfig
    layer = Ernie45MoeLayer
    names = WeightNames(
        rename=((r"\.gate\.moe_statics\.", ".moe_statics."),),
        ignore=(r"^model\.mtp_",),
        rewrite=(Rewrite(r"moe_statics", _flat),),
    )

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        size = (config.hidden_size, config.vocab_size)
        return b.head("lm_head", *size, tied=tied, bias=config.use_bias)

    @classmethod
    def mtp(cls, config: Ernie45MoeConfig) -> MtpLayer | None:
        c = config
        if not c.num_nextn_predict_layers:
            return None
        return MtpLayer(
            layer=lambda b: ErnieLayer(c, b, 0, standard_mlp(c, b, bias=c.use_bias)),
            at="model.mtp_block.0",
            hidden=c.hidden_size,
            eps=c.rms_norm_eps,
            embedding_norm="model.mtp_emb_norm.0",
            hidden_norm="model.mtp_hidden_norm.0",
            project="model.mtp_linear_proj.0",
            norm="model.norm",
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "ernie4_5_moe",
            "Ernie4_5_MoeForCausalLM",
            moe_intermediate_size=32,
            moe_num_experts=6,
            moe_k=2,
        )
