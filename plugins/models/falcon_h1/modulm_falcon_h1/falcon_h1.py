"""Falcon-H1 (TII, arXiv 2507.22448): a state space and attention in parallel in every layer.

Its multipliers are folded into the weights during loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, StateSpec
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Embedding, Head, Norm, Rewrite, WeightNames
from modulm_layers import (
    CausalConv,
    DecoderConfig,
    DecoderForCausalLM,
    GatedMLP,
    GatedNorm,
    PreNormLayer,
    size,
    standard_attention,
    tiny_config,
)

__all__ = ["FalconH1Config", "FalconH1ForCausalLM", "FalconH1Layer", "FalconH1Mixer"]


def _of_length(length: int) -> Any:
    def check(_: object, attribute: Any, value: tuple[float, ...]) -> None:
        if len(value) != length:
            raise ValueError(f"{attribute.name}: {length} numbers are needed, got {len(value)}")

    return field(default=(1.0,) * length, validator=check)


@frozen(kw_only=True)
class FalconH1Config(DecoderConfig):
    """config.json of Falcon-H1.

    `ssm_multipliers` are for the gate, the inputs, b, c and the step sizes of the state space;
    `mlp_multipliers` for the gate and the output of the feed-forward part.
    """

    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = size(8192)
    mamba_d_ssm: int | None = size(None)
    mamba_n_heads: int = size(128)
    mamba_n_groups: int = size(1)
    mamba_d_state: int = size(256)
    mamba_d_conv: int = size(4, least=2)
    mamba_expand: int = size(2)
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    key_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, ...] = _of_length(5)
    mlp_multipliers: tuple[float, ...] = _of_length(2)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.state_width % self.mamba_n_heads:
            raise ValueError(f"mamba_n_heads: does not divide a width of {self.state_width}")
        if self.mamba_n_heads % self.mamba_n_groups:
            raise ValueError("mamba_n_groups: does not divide mamba_n_heads")

    @property
    def state_width(self) -> int:
        """Channels of the state space."""
        return self.mamba_d_ssm or self.mamba_expand * self.hidden_size

    @property
    def state_parts(self) -> list[int]:
        """Outputs of its projection: gate, inputs, b, c, step sizes."""
        each = self.mamba_n_groups * self.mamba_d_state
        return [self.state_width, self.state_width, each, each, self.mamba_n_heads]


class FalconH1Mixer(Module):
    """Mamba 2's state space (Dao and Gu, arXiv 2405.21060), gated, with a norm in some models."""

    a_log: Tensor
    skip: Tensor
    dt_bias: Tensor

    def __init__(self, c: FalconH1Config, b: Builder) -> None:
        super().__init__()
        width, heads, size = c.state_width, c.mamba_n_heads, c.mamba_d_state
        head_dim, each = width // heads, c.mamba_n_groups * size
        self.heads, self.groups = b.share(heads), b.share(c.mamba_n_groups, 1)
        self.limit, self.ops = c.time_step_limit, b.ops
        rank_inner, rank_state = self.heads * head_dim, self.groups * size
        self.parts, self.mixed = (
            [rank_inner, rank_inner + 2 * rank_state, self.heads],
            [rank_inner, rank_state, rank_state],
        )
        pieces, least = [width, width, each, each, heads], [head_dim, head_dim, size, size, 1]
        self.project = b.pieces("in_proj", c.hidden_size, pieces, least, bias=c.mamba_proj_bias)
        self.conv = CausalConv(
            b,
            "conv1d",
            pieces[1:4],
            c.mamba_d_conv,
            bias=c.mamba_conv_bias,
            act=c.hidden_act,
            least=least[1:4],
        )
        for name, attribute in (("A_log", "a_log"), ("D", "skip"), ("dt_bias", "dt_bias")):
            b.cut_parameter(name, self, attribute, (b.shard(heads),), dtype=torch.float32)
        self.norm: GatedNorm | None = None
        if c.mamba_rms_norm:
            first = c.mamba_norm_before_gate
            self.norm = GatedNorm(b, "norm", width, c.mamba_n_groups, c.rms_norm_eps, first=first)
        self.out = b.row_linear("out_proj", width, c.hidden_size, bias=c.projectors_bias)
        state = ("state", (self.heads, head_dim, size), "float32")
        self.cache = b.cache(StateSpec((("conv", self.conv.state, b.dtype), state)))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        cache, plan, tokens = batch.caches[self.cache], batch.plan(self.cache), x.shape[0]
        gate, mixed, step = self.project(x).split(self.parts, -1)
        inputs, b, c = self.conv(mixed, cache["conv"], plan).split(self.mixed, -1)
        y = self.ops.selective_scan(
            inputs.view(tokens, self.heads, -1),
            step,
            self.a_log.unsqueeze(-1),
            b.view(tokens, self.groups, -1),
            c.view(tokens, self.groups, -1),
            self.skip,
            cache["state"],
            plan,
            bias=self.dt_bias,
            limit=self.limit,
        )
        mixed_out: Tensor = self.out(self._gated(y.flatten(1), gate))
        return mixed_out

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """y, gate: [tokens, width]; the norm, if any, comes before or after the gate."""
        if self.norm is None:
            return self.ops.multiply(y, gate, "silu")  # type: ignore[no-any-return]
        normed: Tensor = self.norm(y, gate)
        return normed


class _SideBySide(Module):
    """The sum of a state space and of attention."""

    def __init__(self, c: FalconH1Config, b: Builder, index: int) -> None:
        super().__init__()
        self.ops = b.ops
        self.mixer = FalconH1Mixer(c, b.at("mamba"))
        self.attn = standard_attention(c, b, index)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        both: Tensor = self.ops.add(self.mixer(x, batch), self.attn(x, batch))
        return both


class FalconH1Layer(PreNormLayer):
    """Both mixers, then the feed-forward part."""

    def __init__(self, c: FalconH1Config, b: Builder, index: int) -> None:
        at, act = b.at("feed_forward"), c.hidden_act
        super().__init__(
            b.rms_norm("input_layernorm", c.hidden_size, c.rms_norm_eps),
            _SideBySide(c, b, index),
            b.rms_norm("pre_ff_layernorm", c.hidden_size, c.rms_norm_eps),
            GatedMLP(at, c.hidden_size, c.inner_size, act, bias=c.mlp_bias),
        )


class FalconH1ForCausalLM(DecoderForCausalLM):
    """Falcon-H1 with a language-model head."""

    api = 1
    config_type = FalconH1Config
    layer = FalconH1Layer

    @classmethod
    def weights(cls, config: FalconH1Config) -> WeightNames:
        c, attended = config, config.attention_in_multiplier
        gate, down = c.mlp_multipliers
        parts = [n for n, width in zip(c.ssm_multipliers, c.state_parts, strict=True)
                 for _ in range(width)]  # fmt: skip
        return WeightNames(
            rewrite=(
                _times("in_proj", c.ssm_in_multiplier, torch.tensor(parts)),
                _times("out_proj", 1.0, c.ssm_out_multiplier),
                _times("k_proj", attended, c.key_multiplier),
                _times("[qv]_proj", attended, 1.0),
                _times("o_proj", 1.0, c.attention_out_multiplier),
                _times("gate_proj", 1.0, gate),
                _times("down_proj", 1.0, down),
            )
        )

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        scale = config.embedding_multiplier
        return b.embedding("embed_tokens", config.vocab_size, config.hidden_size, scale=scale)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.rms_norm("final_layernorm", config.hidden_size, config.rms_norm_eps)

    def make_head(self, config: Any, b: Builder) -> Head:
        tied = self.embed if config.tie_word_embeddings else None
        scale = config.lm_head_multiplier
        return b.head("lm_head", config.hidden_size, config.vocab_size, tied=tied, scale=scale)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "falcon_h1",
            "FalconH1ForCausalLM",
            mamba_d_ssm=96,
            mamba_n_heads=6,
            mamba_n_groups=2,
            mamba_d_state=12,
            mamba_d_head=16,
            mamba_chunk_size=16,
            embedding_multiplier=1.5,
            lm_head_multiplier=0.8,
            attention_in_multiplier=0.9,
            attention_out_multiplier=1.2,
            key_multiplier=0.7,
            ssm_in_multiplier=1.3,
            ssm_out_multiplier=0.6,
            ssm_multipliers=[0.9, 1.2, 0.7, 1.4, 0.8],
            mlp_multipliers=[1.3, 0.7],
        )


#: What a quantized layer has beside its scales: codes and their places.
_CODES = {"g_idx", "qweight", "qzeros", "weight_packed", "weight_shape", "weight_zero_point"}


def _times(layer: str, inputs: float, outputs: float | Tensor) -> Rewrite:
    """Fold factors of a linear layer's input and output into its weight, in fp32; of a quantized
    one into its scales.

    outputs: one factor, or one per output.
    """

    def change(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        factor = torch.as_tensor(outputs, device=tensor.device)
        kind = name.rpartition(".")[2]
        if kind in _CODES or (kind == "weight" and tensor.element_size() == 1):
            yield name, tensor
        elif kind == "bias":
            yield name, tensor.float() * factor
        elif kind == "input_scale":
            yield name, tensor.float() / inputs
        elif kind == "scales":  # [groups, outputs]
            yield name, tensor.float() * factor * inputs
        elif kind in ("weight", "weight_scale") and factor.shape in ((), tensor.shape[:1]):
            each = factor.reshape(-1, *[1] * (tensor.dim() - 1))
            yield name, tensor.float() * each * inputs
        else:
            raise UnsupportedError(f"{name}: not supported yet in this quantization")

    return Rewrite(rf"\.{layer}\.", change)
