"""Ouro (ByteDance, arXiv 2510.25741): the same layers run several times, norms around branches.

Each run has keys and values of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder, WeightNames
from modulm_layers import (
    Attention,
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    SandwichLayer,
    size,
    standard_mlp,
    tiny_config,
)

__all__ = ["OuroConfig", "OuroForCausalLM", "OuroLayer"]


@frozen(kw_only=True)
class OuroConfig(DecoderConfig):
    """config.json of Ouro: `total_ut_steps` is how often the layers run.

    `early_exit_threshold` below 1, which ends the runs of single tokens early, is rejected.
    """

    total_ut_steps: int = size(4)
    early_exit_threshold: float = 1.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.early_exit_threshold < 1:
            raise ValueError(
                f"early_exit_threshold: not supported yet: {self.early_exit_threshold}"
            )


class LoopedAttention(Attention):
    """Attention with a cache for each run; `loop` is the current one."""

    def __init__(self, c: OuroConfig, b: Builder, index: int) -> None:
        self.loops = c.total_ut_steps
        super().__init__(
            b,
            hidden=c.hidden_size,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_size,
            rope=c.rope(c.layer_type(index)),
            window=c.window(index),
        )

    def make_cache(
        self, b: Builder, spec: AttentionSpec, kv_heads: int, names: AttentionNames
    ) -> None:
        """Register the caches of all runs."""
        super().make_cache(b, spec, kv_heads, names)
        copies = max(b.shared.mesh.tensor.size // kv_heads, 1)
        more = range(1, self.loops)
        self.loop_caches = [self.cache] + [
            b.at(f"loop_{loop}").attention_cache(spec, copies=copies)[0] for loop in more
        ]

    def select(self, loop: int) -> None:
        """Make `loop` the current run."""
        self.cache = self.loop_caches[loop]


class OuroLayer(SandwichLayer):
    """norm, attention, norm, add; norm, feed-forward, norm, add."""

    attn: LoopedAttention

    def __init__(self, c: OuroConfig, b: Builder, index: int) -> None:
        def norm(name: str) -> Any:
            return b.rms_norm(name, c.hidden_size, c.rms_norm_eps)

        super().__init__(
            norm("input_layernorm"),
            LoopedAttention(c, b.at("self_attn"), index),
            norm("input_layernorm_2"),
            norm("post_attention_layernorm"),
            standard_mlp(c, b),
            norm("post_attention_layernorm_2"),
        )


class OuroForCausalLM(DecoderForCausalLM):
    """Ouro with a language-model head."""

    api = 1
    config_type = OuroConfig
    layer = OuroLayer
    names = WeightNames(ignore=(r"^model\.early_exit_gate\.",))
    oracle = "modulm_ouro.oracle:AsLlama"

    def __init__(self, config: OuroConfig, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline parallelism: not supported yet: OuroForCausalLM, whose layers run "
                "several times; use --tensor-parallel-size"
            )
        super().__init__(config, build)

    def _run(
        self,
        batch: Batch,
        captured: dict[int, Tensor] | None = None,
        selected: frozenset[int] = frozenset(),
    ) -> tuple[Tensor, Tensor | None]:
        x: Tensor = self.embed(batch)
        residual: Tensor | None = None
        for loop in range(self.config.total_ut_steps):
            if loop:
                x, residual = self.norm.add(x, residual)[0], None
            for index, layer in enumerate(self.layers):
                attention: Any = layer.attn
                attention.select(loop)
                x, residual = layer(x, residual, batch)
                if index in selected and captured is not None:
                    captured[index] = x if residual is None else self.norm.ops.add(x, residual)
        return x, residual

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config("ouro", "OuroForCausalLM", num_hidden_layers=2, total_ut_steps=3)
