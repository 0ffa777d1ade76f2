"""HY 4 (Tencent, 2026): DeepSeek's sparse attention with sinks and a gate, experts with bounded
activations, and several residual streams that each branch reads and writes by gates of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from attrs import evolve, field, frozen, validators
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from modulm.contracts.attention import AttentionInputs, AttentionSpec
from modulm.contracts.model import Batch, MtpLayer
from modulm.errors import UnsupportedError
from modulm.nn import Builder, WeightNames
from modulm_deepseek.deepseek_v2 import tiny_deepseek
from modulm_deepseek.deepseek_v32 import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    Indexer,
    SparseLatentAttention,
)
from modulm_layers import MoE, only, routed_experts, size, standard_mlp

__all__ = ["HYV4Config", "HYV4ForCausalLM", "HYV4Layer"]

_PERIOD = 4


@frozen(kw_only=True)
class HYV4Config(GlmMoeDsaConfig):
    """config.json of HY 4.

    hc_mult: residual streams. hc_magnitude: bound of the gates that write to them. swiglu_limit:
    bound of routed experts' activations, 0 for none.
    """

    INDEX_NEOX: ClassVar[bool] = True

    q_lora_rank: int = size(1536)
    rope_interleave: bool = field(default=False, validator=validators.in_((False,)))
    first_k_dense_replace: int = size(1, least=0)
    n_shared_experts: int | None = size(1)
    routed_scaling_factor: float = 2.827
    num_nextn_predict_layers: int = size(0, least=0)
    index_n_heads: int = size(16)
    hc_mult: int = size(4)
    hc_magnitude: float = 2.0
    hc_eps: float = 1e-6
    swiglu_limit: float = 10.0
    enable_ihc: bool = True
    gated_mla: bool = True
    gating_type: str = "elementwise"
    learnable_sink: bool = True

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(
            self,
            enable_ihc=(True,),
            gated_mla=(True,),
            gating_type=("elementwise",),
            learnable_sink=(True,),
        )

    def picks(self, index: int) -> bool:
        if self.indexer_types is not None or self.index_topk_pattern is not None:
            return super().picks(index)
        return index == 0 or (index - 1) % _PERIOD == 0


class HYIndexer(Indexer):
    """An indexer that rotates the last dimensions of its heads."""

    def __init__(self, c: DeepseekV32Config, b: Builder, follows: str) -> None:
        super().__init__(c, b, follows)
        self.k_norm.eps, self.turned = c.rms_norm_eps, c.qk_rope_head_dim

    def arrange(self, x: Tensor) -> Tensor:
        return x.roll(self.turned, -1)


class HYAttention(SparseLatentAttention):
    """Sparse latent attention with a sink per head and a gate per number."""

    sinks: Tensor
    indexer_type = HYIndexer

    def __init__(self, c: HYV4Config, b: Builder, index: int) -> None:
        super().__init__(c, b, index)
        width = c.heads * c.v_head_dim
        self.gates = b.linear("gate_proj", c.hidden_size, width, least=c.v_head_dim)
        b.cut_parameter("sinks", self, "sinks", (b.shard(c.heads),), dtype=torch.float32)

    def make_cache(self, b: Builder, spec: AttentionSpec) -> None:
        super().make_cache(b, evolve(spec, sinks=True))

    def selection(self, x: Tensor, compressed: Tensor, batch: Batch) -> AttentionInputs:
        return evolve(super().selection(x, compressed, batch), sinks=self.sinks)

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        return super().project_out(out * self.gates(x).sigmoid().view(out.shape), x)


class Streams(Module):
    """Gates on several residual streams (hyper-connections, arXiv 2409.19606), computed in fp32.

    gates: of each stream, by name; names: stored names of the map, its bias and its scale.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor

    def __init__(self, c: HYV4Config, b: Builder, gates: int, start: str = "") -> None:
        super().__init__()
        count, self.eps, self.norm_eps = c.hc_mult, c.hc_eps, c.rms_norm_eps
        shapes = {"fn": (gates * count, count * c.hidden_size), "base": (gates * count,)}
        for name, shape in {**shapes, "scale": (gates,)}.items():
            b.parameter(f"{start}{name}", self, name, shape, torch.float32)
        self.gates, self.magnitude = gates, c.hc_magnitude

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the mixed streams [tokens, hidden] and, with two gates, what a branch's output is
        multiplied by to be added to each: [tokens, streams]. streams: [tokens, streams, hidden].
        """
        flat = streams.flatten(1).float()
        scale = (flat.square().mean(-1, keepdim=True) + self.norm_eps).rsqrt()
        logits = F.linear(flat, self.fn) * scale
        logits = logits.unflatten(-1, (self.gates, -1)) * self.scale[:, None]
        gates = (logits + self.base.view(self.gates, -1)).sigmoid()
        mixed = ((gates[:, 0] + self.eps).unsqueeze(-1) * streams.float()).sum(1)
        written = self.magnitude * gates[:, 1] + self.eps if self.gates > 1 else None
        return mixed.to(streams.dtype), written


class HYV4Layer(Module):
    """Attention and feed-forward, each between gates on the streams."""

    attn: HYAttention

    def __init__(self, c: HYV4Config, b: Builder, index: int) -> None:
        super().__init__()
        self.attn_streams = Streams(c, b.at("attn_hc"), 2)
        self.attn_norm = b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps)
        self.attn = HYAttention(c, b.at("self_attn"), index)
        self.mlp_streams = Streams(c, b.at("ffn_hc"), 2)
        self.mlp_norm = b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp: Module = _experts(c, b.at("mlp")) if c.sparse(index) else standard_mlp(c, b)

    def forward(self, streams: Tensor, batch: Batch) -> Tensor:
        """streams: [tokens, streams, hidden] -> the same shape."""
        x, gates = self.attn_streams(streams)
        streams = _written(streams, self.attn(self.attn_norm(x), batch), gates)
        x, gates = self.mlp_streams(streams)
        return _written(streams, self.mlp(self.mlp_norm(x)), gates)


def _experts(c: HYV4Config, b: Builder) -> MoE:
    """Make experts whose activations are bounded, which the op `fused_experts` lacks."""
    experts = routed_experts(c, b)
    if c.swiglu_limit > 0:
        if experts.fused_experts != b.ops.fused_experts:
            raise UnsupportedError(
                "HYV4ForCausalLM: not supported yet: --enable-expert-parallel, and adapters of "
                "experts"
            )
        experts.fused_experts = partial(_bounded_experts, c.swiglu_limit)
    return experts


def _bounded_experts(
    bound: float, x: Tensor, weights: Tensor, ids: Tensor, gate_up: Any, down: Any, **_: Any
) -> Tensor:
    """Sum down(silu(min(gate, bound)) * clamp(up)) of a token's experts in index order, in fp32."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, -1)
        inner = F.silu(gate.clamp(max=bound)) * up.clamp(-bound, bound)
        out = F.linear(inner, down[expert]).float()
        total.index_add_(0, rows, out * weights[rows, choices, None])
    return total.to(x.dtype)


def _written(streams: Tensor, x: Tensor, gates: Tensor) -> Tensor:
    """Add x [tokens, hidden] to each stream, multiplied by its gate."""
    added = gates.unsqueeze(-1) * x.float().unsqueeze(1)
    return (added + streams.float()).to(streams.dtype)


class HYV4ForCausalLM(DeepseekV32ForCausalLM):
    """HY 4 with a language-model head."""

    config_type = HYV4Config
    layer = HYV4Layer
    #: Products of torch, of streams with their gates and of bounded experts, round by rows.
    batch_invariant = False

    def __init__(self, config: HYV4Config, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline parallelism: not supported yet: HYV4ForCausalLM, which has several "
                "residual streams; use --tensor-parallel-size"
            )
        super().__init__(config, build)
        self.collapse = Streams(config, build.at(self.root).at("hc_head"), 1, "hc_")

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(
            names,
            rename=(
                (r"\.hc_pre\.hc_", ".hc_"),
                (r"\.learnable_sink_param$", ".sinks"),
                (r"\.linear_gate\.", ".gate_proj."),
                (r"\.hc_attn_layer\.hc_", ".attn_hc."),
                (r"\.hc_mlp_layer\.hc_", ".ffn_hc."),
                (r"\.hc_head_(fn|base|scale)", r".hc_\1"),
            ),
            ignore=(*names.ignore, r"^model\.mtp_layers\."),
        )

    @classmethod
    def mtp(cls, config: Any) -> MtpLayer | None:
        return None

    def _run(
        self,
        batch: Batch,
        captured: dict[int, Tensor] | None = None,
        selected: frozenset[int] = frozenset(),
    ) -> tuple[Tensor, Tensor | None]:
        streams = self.embed(batch).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        for index, layer in enumerate(self.layers):
            streams = layer(streams, batch)
            if index in selected and captured is not None:
                captured[index] = self.collapse(streams)[0]
        return self.collapse(streams)[0], None

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        settings = {"index_topk": 6, "index_head_dim": 32, "index_n_heads": 16, "q_lora_rank": 40}
        return tiny_deepseek(
            "hy_v4",
            "HYV4ForCausalLM",
            **settings,
            num_hidden_layers=4,
            n_group=1,
            topk_group=1,
            indexer_types=["full", "full", "shared", "full"],
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            hc_mult=3,
            hc_magnitude=1.5,
            swiglu_limit=0.5,
        )
