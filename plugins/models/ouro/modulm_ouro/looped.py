"""Decoders whose layers run several times, each run with keys and values of its own."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder
from modulm_layers import Attention, AttentionNames, DecoderConfig, DecoderForCausalLM

__all__ = ["LoopedAttention", "LoopedForCausalLM"]


class LoopedAttention(Attention):
    """Attention with a cache for each of `loops` runs."""

    def __init__(self, c: DecoderConfig, b: Builder, index: int, loops: int) -> None:
        self.loops = loops
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


class LoopedForCausalLM(DecoderForCausalLM):
    """A decoder whose layers run several times; their attention has a method `select`.

    A family sets `loops_key`, the key of config.json for how often, and, by
    `normed_between`, whether the final norm also stands between two runs.
    """

    loops_key: ClassVar[str]

    def __init__(self, config: Any, build: Builder) -> None:
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                f"pipeline parallelism: not supported yet: {type(self).__name__}, whose layers "
                "run several times; use --tensor-parallel-size"
            )
        super().__init__(config, build)

    @property
    def normed_between(self) -> bool:
        """Whether the final norm is applied after every run."""
        return True

    def _run(
        self,
        batch: Batch,
        captured: dict[int, Tensor] | None = None,
        selected: frozenset[int] = frozenset(),
    ) -> tuple[Tensor, Tensor | None]:
        x: Tensor = self.embed(batch)
        residual: Tensor | None = None
        for loop in range(getattr(self.config, self.loops_key)):
            if loop and self.normed_between:
                x, residual = self.norm.add(x, residual)[0], None
            for index, layer in enumerate(self.layers):
                attention: Any = layer.attn
                attention.select(loop)
                x, residual = layer(x, residual, batch)
                if index in selected and captured is not None:
                    captured[index] = x if residual is None else self.norm.ops.add(x, residual)
        return x, residual
