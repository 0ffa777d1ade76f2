"""Step 3.5 Flash (StepFun, 2026): sliding layers with more query heads, a gate per head, experts
chosen by sigmoids, and activations that are clamped in some layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from attrs import asdict, field, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import MtpLayer
from modulm.nn import Builder, Rewrite, WeightNames
from modulm_layers import (
    Attention,
    DecoderConfig,
    DecoderForCausalLM,
    ExpertChoice,
    ExpertNames,
    GatedMLP,
    MoE,
    PreNormLayer,
    Rope,
    Routing,
    only,
    parse_rope,
    size,
    tiny_config,
)
from modulm_stepfun.step3 import layer_indices, split_stack

__all__ = ["Step3p5Config", "Step3p5ForCausalLM", "Step3p5Layer"]

_NAMES = ExpertNames(choice_bias="router_bias")


@frozen(kw_only=True)
class Step3p5Config(DecoderConfig):
    """config.json of Step 3.5 Flash. Lists per layer may continue with the layers that draft.

    attention_other_setting: `num_attention_heads` of sliding layers. rope_theta,
    partial_rotary_factors: one for all layers or one per layer. yarn_only_types: kinds of layers
    that `rope_scaling` applies to; all by default. swiglu_limits, swiglu_limits_shared: bounds of
    the activations of experts, and of dense blocks and shared experts; 0 for none.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_attention_groups": "num_key_value_heads",
        "share_expert_dims": "share_expert_dim",
    }

    head_dim: int | None = size(128)
    rms_norm_eps: float = 1e-5
    rope_theta: Any = 10000.0
    partial_rotary_factors: tuple[float, ...] | None = None
    yarn_only_types: tuple[str, ...] | None = None
    attention_other_setting: dict[str, Any] | None = None
    use_head_wise_attn_gate: bool = True
    moe_num_experts: int = size(288)
    moe_top_k: int = size(8)
    moe_intermediate_size: int = size(1280)
    share_expert_dim: int = size(1280)
    moe_layers_enum: Any = field(default=None, converter=layer_indices)
    moe_router_activation: str = "sigmoid"
    moe_router_scaling_factor: float = 1.0
    use_moe_router_bias: bool = True
    norm_expert_weight: bool = True
    swiglu_limits: tuple[float | None, ...] | None = None
    swiglu_limits_shared: tuple[float | None, ...] | None = None
    num_nextn_predict_layers: int = size(0, least=0)
    mtp_layer_types: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        count, kinds = self.num_hidden_layers, self.layer_types
        if kinds is not None and len(kinds) == count + self.num_nextn_predict_layers:
            object.__setattr__(self, "layer_types", kinds[:count])
            object.__setattr__(self, "mtp_layer_types", kinds[count:] or self.mtp_layer_types)
        super().__attrs_post_init__()
        known = ("full_attention", "sliding_attention")
        if set(self.layer_types or ()) - {*known}:
            raise ValueError(f"layer_types: known are {', '.join(known)}")
        only(
            self,
            hidden_act=("silu",),
            moe_router_activation=("sigmoid",),
            use_head_wise_attn_gate=(True,),
        )
        self.routing.check(self.moe_num_experts)

    @property
    def routing(self) -> Routing:
        """Sigmoid routing."""
        return Routing(
            self.moe_top_k,
            scoring="sigmoid",
            renormalise=self.norm_expert_weight,
            scale=self.moe_router_scaling_factor,
        )

    def layer_type(self, index: int) -> str:
        kinds = (*(self.layer_types or ()), *self.mtp_layer_types)
        return kinds[index] if index < len(kinds) else "full_attention"

    def window(self, index: int) -> int | None:
        sliding = self.layer_type(index) == "sliding_attention"
        return (self.sliding_window or None) if sliding else None

    def heads_of(self, index: int) -> int:
        """Query heads of layer `index`."""
        other = self.attention_other_setting or {}
        if self.layer_type(index) != other.get("attention_type", "sliding_attention"):
            return self.heads
        return int(other.get("num_attention_heads", self.heads))

    def sparse(self, index: int) -> bool:
        """Whether layer `index` has experts."""
        if self.moe_layers_enum is not None:
            return index in self.moe_layers_enum
        return 0 < index < self.num_hidden_layers

    def limit(self, index: int, *, experts: bool) -> float:
        """Bound of the activations of layer `index`, 0 for none."""
        limits = (self.swiglu_limits if experts else self.swiglu_limits_shared) or ()
        return (limits[index] if index < len(limits) else 0.0) or 0.0

    def rope(self, layer_type: str = "") -> Rope:
        """Return the positions of the layers of one type, which are those of the first of them."""
        kinds = self.layer_types or ("",)
        index = kinds.index(layer_type) if layer_type in kinds else 0
        thetas, parts = self.rope_theta, self.partial_rotary_factors
        scaled = self.yarn_only_types is None or layer_type in self.yarn_only_types
        return parse_rope(
            {
                **(self.rope_scaling or {} if scaled else {}),
                "rope_theta": thetas[index] if isinstance(thetas, list | tuple) else thetas,
                "partial_rotary_factor": parts[index] if parts else 1.0,
            },
            head_size=self.head_size,
            max_positions=self.max_position_embeddings,
        )


class Step3p5Attention(Attention):
    """Attention whose heads are scaled by the sigmoid of a projection each."""

    def __init__(self, c: Step3p5Config, b: Builder, index: int) -> None:
        heads = c.heads_of(index)
        norms = tuple(
            b.rms_norm(f"{part}_norm", c.head_size, c.rms_norm_eps, offset=1.0) for part in "qk"
        )
        super().__init__(
            b,
            hidden=c.hidden_size,
            heads=heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_size,
            rope=c.rope(c.layer_type(index)),
            bias=c.attention_bias,
            window=c.window(index),
            qk_norm=(norms[0], norms[1]),
        )
        self.head_gates = b.linear("g_proj", c.hidden_size, heads)

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        # fp64, since fp32 rounds by how many numbers there are (`modulm_layers.recurrence`).
        gates = self.head_gates(x).double().sigmoid().to(out.dtype)
        return super().project_out(out * gates.unsqueeze(-1), x)


class ClampedMLP(GatedMLP):
    """down(min(silu(gate(x)), limit) * clamp(up(x))), the clamp to [-limit, limit]."""

    def __init__(self, b: Builder, hidden: int, inner: int, limit: float) -> None:
        super().__init__(b, hidden, inner)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        inner = F.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)
        out: Tensor = self.down(inner)
        return out


class ClampedExperts(ExpertChoice):
    """Experts with clamped activations, which the op `fused_experts` lacks: single blocks, of which
    a step runs the chosen ones.
    """

    def __init__(self, c: Step3p5Config, b: Builder, limit: float, shared: Module) -> None:
        super().__init__()
        self.ops, self.routing, self.shared = b.ops, asdict(c.routing), shared
        self.router = b.router("gate", c.hidden_size, c.moe_num_experts, wide=True)
        b.parameter("router_bias", self, "choice_bias", (c.moe_num_experts,), torch.float32)
        self.experts = ModuleList(
            ClampedMLP(b.at(f"experts.{i}"), c.hidden_size, c.moe_intermediate_size, limit)
            for i in range(c.moe_num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden], added in the order of the experts in fp32."""
        weights, ids = self.choose(self.router(x))
        total = self.shared(x).float()
        for expert in ids.unique().tolist():
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            outputs = self.experts[expert](x[rows]).float() * weights[rows, choices, None]
            total.index_add_(0, rows, outputs)
        return total.to(x.dtype)


class Step3p5Layer(PreNormLayer):
    """The pre-norm block with norms whose weights are stored less 1."""

    def __init__(self, c: Step3p5Config, b: Builder, index: int) -> None:
        def norm(name: str) -> Any:
            return b.rms_norm(name, c.hidden_size, c.rms_norm_eps, offset=1.0)

        super().__init__(
            norm("input_layernorm"),
            Step3p5Attention(c, b.at("self_attn"), index),
            norm("post_attention_layernorm"),
            _experts(c, b, index) if c.sparse(index) else _dense(c, b.at("mlp"), index),
        )


def _dense(c: Step3p5Config, b: Builder, index: int, width: int = 0) -> Module:
    limit, width = c.limit(index, experts=False), width or c.inner_size
    block = ClampedMLP(b, c.hidden_size, width, limit) if limit else None
    return block or GatedMLP(b, c.hidden_size, width)


def _experts(c: Step3p5Config, b: Builder, index: int) -> Module:
    shared = _dense(c, b.at("share_expert"), index, c.share_expert_dim)
    limit = c.limit(index, experts=True)
    if limit:
        return ClampedExperts(c, b.at("moe"), limit, shared)
    return MoE(
        b.at("moe"),
        hidden=c.hidden_size,
        inner=c.moe_intermediate_size,
        experts=c.moe_num_experts,
        routing=c.routing,
        wide_router=True,
        choice_bias=c.use_moe_router_bias,
        shared=shared,
        names=_NAMES,
    )


class Step3p5ForCausalLM(DecoderForCausalLM):
    """Step 3.5 Flash with a language-model head; the first layer after the last drafts tokens
    (`mtp`), with the model's own head instead of its copy.
    """

    api = 1
    config_type = Step3p5Config
    layer = Step3p5Layer
    oracle = "modulm_stepfun.oracle:AsStep37"

    def make_norm(self, config: Any, b: Builder) -> Any:
        return b.rms_norm("norm", config.hidden_size, config.rms_norm_eps, offset=1.0)

    @classmethod
    def weights(cls, config: Step3p5Config) -> WeightNames:
        first = config.num_hidden_layers
        drafts = range(first, first + config.num_nextn_predict_layers)
        return WeightNames(
            ignore=tuple(rf"^model\.layers\.{i}\." for i in drafts),
            rename=(
                (r"\.transformer\.", "."),
                (r"\.shared_head\.output\.", ".shared_head.head."),
                (r"\.moe\.share_expert\.", ".share_expert."),
            ),
            rewrite=(Rewrite(r"\.moe\.(gate|up|down)_proj\.weight$", split_stack),),
        )

    @classmethod
    def mtp(cls, config: Step3p5Config) -> MtpLayer | None:
        c, index = config, config.num_hidden_layers
        at = f"model.layers.{index}"
        if not c.num_nextn_predict_layers:
            return None
        return MtpLayer(
            layer=lambda b: Step3p5Layer(c, b, index),
            at=at,
            hidden=c.hidden_size,
            eps=c.rms_norm_eps,
            embedding_norm=f"{at}.enorm",
            hidden_norm=f"{at}.hnorm",
            project=f"{at}.eh_proj",
            norm=f"{at}.shared_head.norm",
            offset=1.0,
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        table = dict(
            tiny_config(
                "step3p5",
                "Step3p5ForCausalLM",
                num_attention_groups=2,
                head_dim=16,
                layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                sliding_window=12,
                attention_other_setting={
                    "attention_type": "sliding_attention", "num_attention_heads": 6,
                },
                rope_theta=[5e6, 1e4, 1e4],
                partial_rotary_factors=[0.5, 1.0, 1.0],
                moe_layers_enum="1,2",
                moe_num_experts=6,
                moe_top_k=2,
                moe_intermediate_size=32,
                share_expert_dim=48,
                moe_router_scaling_factor=1.5,
                swiglu_limits=[0.0, 0.0, 0.4],
                swiglu_limits_shared=[0.3, 0.0, 0.5],
            )
        )  # fmt: skip
        del table["num_key_value_heads"]
        return table
