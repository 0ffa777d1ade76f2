"""EXAONE 4 (LG AI Research, arXiv 2507.11407): each branch is normed before it is added.

In models with windows, the global layers have no positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.model import Batch, MtpLayer
from modulm.nn import Builder, WeightNames
from modulm_layers import (
    Attention,
    DecoderConfig,
    DecoderForCausalLM,
    size,
    standard_attention,
    standard_mlp,
    tiny_config,
)

__all__ = [
    "Exaone4Config",
    "Exaone4ForCausalLM",
    "Exaone4Layer",
    "check_pattern",
    "exaone_attention",
    "layer_kind",
]


@frozen(kw_only=True)
class Exaone4Config(DecoderConfig):
    """config.json of EXAONE 4.

    Without layer types, `sliding_window_pattern` decides: an interval of global layers, or
    repeating letters ("LLLG").
    """

    rms_norm_eps: float = 1e-5
    sliding_window: int | None = size(None)
    sliding_window_pattern: Any = 4

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_pattern(self.sliding_window_pattern)

    def layer_type(self, index: int) -> str:
        return layer_kind(self, self.sliding_window_pattern, index)


def check_pattern(pattern: Any) -> None:
    """Raise ValueError for an invalid `sliding_window_pattern`."""
    if type(pattern) is not int and (type(pattern) is not str or set(pattern) - {"L", "G"}):
        raise ValueError(f"sliding_window_pattern: {pattern!r} is neither a count nor L and G")


def layer_kind(c: DecoderConfig, pattern: int | str, index: int) -> str:
    """The type of layer `index`, from the file or from the pattern."""
    if c.layer_types is not None:
        return c.layer_types[index]
    if c.sliding_window is None or not pattern:
        return "full_attention"
    if isinstance(pattern, str):
        last = index == c.num_hidden_layers - 1
        full = last or pattern[index % len(pattern)] == "G"
    else:
        full = (index + 1) % pattern == 0
    return "full_attention" if full else "sliding_attention"


def exaone_attention(c: DecoderConfig, b: Builder, kind: str) -> Attention:
    """Attention of a layer of a kind; queries and keys have a norm per head."""
    at = b.at("self_attn")
    norms = tuple(at.rms_norm(name, c.head_size, c.rms_norm_eps) for name in ("q_norm", "k_norm"))
    hybrid = c.sliding_window is not None
    rope = None if hybrid and kind == "full_attention" else c.rope(kind)
    window = c.sliding_window if kind == "sliding_attention" else None
    return standard_attention(c, b, 0, rope=rope, qk_norm=norms, window=window)


class Exaone4Layer(Module):
    """x + norm(attention(x)), then x + norm(feed-forward(x))."""

    def __init__(self, c: Exaone4Config, b: Builder, index: int) -> None:
        super().__init__()
        self.ops, self.attn = b.ops, exaone_attention(c, b, c.layer_type(index))
        self.attn_norm = b.rms_norm("post_attention_layernorm", c.hidden_size, c.rms_norm_eps)
        self.mlp = standard_mlp(c, b)
        self.mlp_norm = b.rms_norm("post_feedforward_layernorm", c.hidden_size, c.rms_norm_eps)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        x = x if residual is None else self.ops.add(residual, x)
        x = self.ops.add(x, self.attn_norm(self.attn(x, batch)))
        return self.mlp_norm(self.mlp(x)), x


class Exaone4ForCausalLM(DecoderForCausalLM):
    """EXAONE 4 with a language-model head. Files of EXAONE 4.5 have a layer that drafts (`mtp`)."""

    api = 1
    config_type = Exaone4Config
    layer = Exaone4Layer
    names = WeightNames(ignore=(r"^mtp\.",))

    @classmethod
    def mtp(cls, config: Exaone4Config) -> MtpLayer | None:
        c = config
        return MtpLayer(
            layer=lambda b: Exaone4Layer(c, b, 0),
            at="mtp.layers.0",
            hidden=c.hidden_size,
            eps=c.rms_norm_eps,
            embedding_norm="mtp.pre_fc_norm_embedding",
            hidden_norm="mtp.pre_fc_norm_hidden",
            project="mtp.fc",
            norm="mtp.norm",
            normed=True,
        )

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "exaone4", "Exaone4ForCausalLM", sliding_window=12, sliding_window_pattern=2
        )
