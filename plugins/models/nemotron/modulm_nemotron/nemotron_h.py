"""Nemotron-H, Nemotron Nano 2 and 3 (arXiv 2504.03624, 2508.14444): one mixer per layer.

A layer is a state space, attention without positions, or a feed-forward block; Nemotron 3 Nano
(arXiv 2512.20848) has experts instead of the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import Factory, evolve, field, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import Batch, MtpLayer
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Embedding, Norm, WeightNames
from modulm_layers import (
    DecoderForCausalLM,
    PlainMLP,
    RoutedConfig,
    StateSpaceMixer,
    only,
    size,
    standard_attention,
    tiny_config,
)
from modulm_nemotron.experts import PlainExperts

__all__ = ["NemotronHConfig", "NemotronHForCausalLM", "NemotronHLayer"]

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


def _from_pattern(config: NemotronHConfig) -> tuple[str, ...] | None:
    """The kind of each layer, from the letters of the pattern."""
    pattern = config.hybrid_override_pattern
    return None if pattern is None else tuple(_LETTERS.get(letter, letter) for letter in pattern)


def _draft_kinds(config: NemotronHConfig) -> tuple[str, ...]:
    """The kind of each layer of a step that drafts."""
    return tuple(_LETTERS.get(letter, letter) for letter in config.mtp_hybrid_override_pattern)


def _renamed(kinds: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Convert old names of kinds to current ones."""
    return None if kinds is None else tuple(_OLDER.get(kind, kind) for kind in kinds)


def _count(config: NemotronHConfig) -> int:
    return len(config.layer_types or ())


@frozen(kw_only=True)
class NemotronHConfig(RoutedConfig):
    """config.json of Nemotron-H; `hybrid_override_pattern` has a letter for each layer."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "layers_block_type": "layer_types",
        "layer_norm_epsilon": "norm_eps",
        "mlp_hidden_act": "hidden_act",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_min": "time_step_min",
        "num_local_experts": "n_routed_experts",
    }

    head_dim: int | None = size(128)
    max_position_embeddings: int = size(4096)
    hidden_act: str = "relu2"
    norm_eps: float = 1e-5
    hybrid_override_pattern: str | None = None
    layer_types: tuple[str, ...] | None = field(
        default=Factory(_from_pattern, takes_self=True), converter=_renamed
    )
    num_hidden_layers: int = size(Factory(_count, takes_self=True))
    ssm_state_size: int = size(128)
    mamba_num_heads: int = size(128)
    mamba_head_dim: int = size(64)
    mamba_hidden_act: str = "silu"
    n_groups: int = size(8)
    conv_kernel: int = size(4, least=2)
    use_conv_bias: bool = True
    use_bias: bool = False
    time_step_min: float = 0.001
    n_routed_experts: int = size(8)
    num_experts_per_tok: int = size(2)
    moe_intermediate_size: int = size(7688)
    moe_shared_expert_intermediate_size: int = size(7688)
    moe_latent_size: int | None = size(None)
    mtp_hybrid_override_pattern: str = "*E"
    mtp_layers_block_type: tuple[str, ...] = field(
        default=Factory(_draft_kinds, takes_self=True), converter=_renamed
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        only(self, mamba_hidden_act=("silu", "swish"))
        kinds = set(self.layer_types or ("none",))
        if kinds - set(_LETTERS.values()):
            raise ValueError(f"layers_block_type: {sorted(kinds)} contain unknown kinds")
        if self.mamba_num_heads % self.n_groups:
            raise ValueError(
                f"n_groups: {self.n_groups} do not divide {self.mamba_num_heads} heads"
            )

    def sparse(self, index: int) -> bool:
        return self.layer_type(index) == "moe"

    def window(self, index: int) -> int | None:
        return None

    def of_layer(self, index: int) -> NemotronHConfig:
        """Return the settings of one layer, for families whose layers differ in size."""
        return self

    def of_drafts(self) -> NemotronHConfig:
        """Return the settings of the layers that draft."""
        kinds = self.mtp_layers_block_type
        return evolve(self, num_hidden_layers=len(kinds), layer_types=kinds)


class _Drafts(Module):
    """The layers of a step that drafts."""

    def __init__(self, c: NemotronHConfig, b: Builder) -> None:
        super().__init__()
        kinds = c.mtp_layers_block_type
        if "full_attention" not in kinds or set(kinds) - {"full_attention", "moe"}:
            raise UnsupportedError(f"mtp_layers_block_type: not supported yet: {list(kinds)}")
        c = c.of_drafts()
        self.layers = ModuleList(NemotronHLayer(c, b.at(str(i)), i) for i in range(len(kinds)))

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return x, residual


class _FeedForward(PlainMLP):
    """A feed-forward block with the interface of the other mixers."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class _Experts(Module):
    """Experts in `latent` dimensions (None: in those of the stream), plus a shared expert."""

    def __init__(self, c: NemotronHConfig, b: Builder) -> None:
        super().__init__()
        hidden, latent, act, bias = c.hidden_size, c.moe_latent_size, c.hidden_act, c.mlp_bias
        self.ops, self.narrow, self.widen = b.ops, None, None
        if latent is not None:
            self.narrow = b.linear("fc1_latent_proj", hidden, latent, bias=bias, split=False)
            self.widen = b.linear("fc2_latent_proj", latent, hidden, bias=bias, split=False)
        self.experts = PlainExperts(
            b,
            hidden=hidden,
            width=latent or hidden,
            inner=c.moe_intermediate_size,
            experts=c.n_routed_experts,
            routing=c.routing,
            act=act,
        )
        at, inner = b.at("shared_experts"), c.moe_shared_expert_intermediate_size
        self.shared = PlainMLP(at, hidden, inner, act, bias=bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        mixed = self.experts(x, x if self.narrow is None else self.narrow(x))
        mixed = mixed if self.widen is None else self.widen(mixed)
        both: Tensor = self.ops.add(mixed, self.shared(x))
        return both


def _mixer(c: NemotronHConfig, b: Builder, index: int) -> Module:
    kind = c.layer_type(index)
    if kind == "full_attention":
        bias = {"bias": False, "out_bias": False}
        return standard_attention(c, b, index, at="mixer", rope=None, **bias)
    at = b.at("mixer")
    if kind == "moe":
        return _Experts(c, at)
    if kind == "mlp":
        return _FeedForward(at, c.hidden_size, c.inner_size, c.hidden_act, bias=c.mlp_bias)
    return StateSpaceMixer(
        at,
        hidden=c.hidden_size,
        heads=c.mamba_num_heads,
        head_dim=c.mamba_head_dim,
        size=c.ssm_state_size,
        groups=c.n_groups,
        width=c.conv_kernel,
        eps=c.norm_eps,
        act=c.mamba_hidden_act,
        bias=c.use_bias,
        conv_bias=c.use_conv_bias,
        dt_limit=(c.time_step_min, float("inf")),
    )


class NemotronHLayer(Module):
    """norm and mixer."""

    def __init__(self, c: NemotronHConfig, b: Builder, index: int) -> None:
        super().__init__()
        self.norm = b.rms_norm("norm", c.hidden_size, c.norm_eps)
        self.mixer = _mixer(c.of_layer(index), b, index)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x, residual = self.norm.add(x, residual)
        return self.mixer(x, batch), residual


class NemotronHForCausalLM(DecoderForCausalLM):
    """Nemotron-H with a language-model head; further layers draft (`mtp`)."""

    api = 1
    config_type = NemotronHConfig
    layer = NemotronHLayer
    names = WeightNames(rename=((r"^backbone\.", "model."),), ignore=(r"^mtp\.",))

    @classmethod
    def mtp(cls, config: NemotronHConfig) -> MtpLayer | None:
        c, last = config, len(config.mtp_layers_block_type) - 1
        return MtpLayer(
            layer=lambda b: _Drafts(c, b),
            at="mtp.layers",
            hidden=c.hidden_size,
            eps=c.norm_eps,
            embedding_norm="mtp.layers.0.enorm",
            hidden_norm="mtp.layers.0.hnorm",
            project="mtp.layers.0.eh_proj",
            norm=f"mtp.layers.{last}.final_layernorm",
            normed=True,
        )

    def make_embedding(self, config: Any, b: Builder) -> Embedding:
        return b.embedding("embeddings", config.vocab_size, config.hidden_size)

    def make_norm(self, config: Any, b: Builder) -> Norm:
        return b.rms_norm("norm_f", config.hidden_size, config.norm_eps)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "nemotron_h",
            "NemotronHForCausalLM",
            layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
            num_hidden_layers=4,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=48,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            head_dim=16,
            ssm_state_size=12,
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            chunk_size=16,
        )
