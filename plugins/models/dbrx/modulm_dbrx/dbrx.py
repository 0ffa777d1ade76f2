"""DBRX (Databricks, 2024): sixteen experts of which four compute, bounded queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from attrs import field, frozen
from torch import Tensor

from modulm.nn import Builder, Norm, Rewrite, WeightNames
from modulm_layers import (
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    ExpertNames,
    MoE,
    PreNormLayer,
    Rope,
    Routing,
    parse_rope,
    size,
    standard_attention,
)

__all__ = ["DbrxConfig", "DbrxForCausalLM", "DbrxLayer"]

_EPS = 1e-5


@frozen(kw_only=True)
class DbrxConfig(DecoderConfig):
    """config.json of DBRX: `attn_config` and `ffn_config` hold the settings of both parts."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
    }

    intermediate_size: int | None = size(None)
    attn_config: dict[str, Any] = field(factory=dict)
    ffn_config: dict[str, Any] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        power = self.ffn_config.get("moe_normalize_expert_weights", 1.0)
        if power not in (None, 1):
            raise ValueError(
                f"ffn_config: moe_normalize_expert_weights: not supported yet: {power!r}; "
                "supported: 1, None"
            )
        self.routing.check(self.experts)

    @property
    def kv_heads(self) -> int:
        return _count(self.attn_config, "attn_config", "kv_n_heads", 1)

    @property
    def clip(self) -> float | None:
        """The bound of queries, keys and values."""
        bound = self.attn_config.get("clip_qkv")
        if bound is not None and not (isinstance(bound, int | float) and bound > 0):
            raise ValueError(f"attn_config: clip_qkv: {bound!r} is not a number above 0")
        return bound

    @property
    def inner_size(self) -> int:
        return _count(self.ffn_config, "ffn_config", "ffn_hidden_size", 3584)

    @property
    def experts(self) -> int:
        """Number of experts."""
        return _count(self.ffn_config, "ffn_config", "moe_num_experts", 4)

    @property
    def routing(self) -> Routing:
        """Softmax routing."""
        top = _count(self.ffn_config, "ffn_config", "moe_top_k", 1)
        normed = self.ffn_config.get("moe_normalize_expert_weights", 1.0)
        return Routing(top, renormalise=normed is not None)

    @property
    def activation(self) -> str:
        """The activation of experts."""
        table = self.ffn_config.get("ffn_act_fn") or {}
        return str(table.get("name", "silu"))

    def rope(self, layer_type: str = "") -> Rope:
        theta = self.attn_config.get("rope_theta", self.rope_theta)
        table = {"rope_theta": theta, **(self.rope_parameters or {})}
        return parse_rope(
            table, head_size=self.head_size, max_positions=self.max_position_embeddings
        )


def _count(table: Mapping[str, Any], name: str, key: str, default: int) -> int:
    value = table.get(key, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: {key}: {value!r} is not a number from 1")
    return value


class DbrxLayer(PreNormLayer):
    """The pre-norm block with layer norms without biases, and experts."""

    def __init__(self, c: DbrxConfig, b: Builder, index: int) -> None:
        at = b.at("norm_attn_norm")
        super().__init__(
            at.layer_norm("norm_1", c.hidden_size, _EPS, bias=False),
            standard_attention(
                c,
                at,
                index,
                at="attn",
                clip=c.clip,
                names=AttentionNames(qkv="Wqkv", out="out_proj"),
            ),
            at.layer_norm("norm_2", c.hidden_size, _EPS, bias=False),
            MoE(
                b.at("ffn"),
                hidden=c.hidden_size,
                inner=c.inner_size,
                experts=c.experts,
                routing=c.routing,
                act=c.activation,
                names=ExpertNames(router="router.layer"),
            ),
        )


def _split(experts: int, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split the experts' tensors, which are stored one below the other; `w2` is transposed."""
    at, _, part = name.rpartition(".mlp.")
    ours = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}[part]
    for expert, weight in enumerate(tensor.chunk(experts)):
        yield f"{at}.{expert}.{ours}.weight", weight.T if part == "w2" else weight


class DbrxForCausalLM(DecoderForCausalLM):
    """DBRX with a language-model head."""

    api = 1
    config_type = DbrxConfig
    layer = DbrxLayer

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.layer_norm("norm", config.hidden_size, _EPS, bias=False)

    @classmethod
    def weights(cls, config: DbrxConfig) -> WeightNames:
        return WeightNames(
            rename=(
                (r"^transformer\.wte\.", "model.embed_tokens."),
                (r"^transformer\.norm_f\.", "model.norm."),
                (r"^transformer\.blocks\.", "model.layers."),
            ),
            rewrite=(Rewrite(r"\.experts\.mlp\.", partial(_split, config.experts)),),
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return {
            "architectures": ["DbrxForCausalLM"],
            "model_type": "dbrx",
            "vocab_size": 512,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 256,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 5000.0},
            "ffn_config": {
                "hidden_size": 64,
                "ffn_hidden_size": 32,
                "moe_num_experts": 4,
                "moe_top_k": 2,
            },
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        }
