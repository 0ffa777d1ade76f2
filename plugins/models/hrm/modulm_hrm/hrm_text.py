"""HRM-Text (Sapient, after arXiv 2506.21734): two stacks of layers that run in cycles, a low one
several times for each run of the high one.

Each run has keys and values of its own. Tokens see those before them; the variant whose instruction
sees itself whole (`token_type_ids`) is a choice of the caller in transformers, and not supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from attrs import frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder, Embedding, Rewrite, RMSNorm, WeightNames
from modulm_layers import (
    Attention,
    AttentionNames,
    DecoderConfig,
    DecoderForCausalLM,
    PreNormLayer,
    size,
    standard_mlp,
    tiny_config,
)

__all__ = ["HrmTextConfig", "HrmTextForCausalLM", "HrmTextLayer"]

_STACKS = ("L_module", "H_module")


@frozen(kw_only=True)
class HrmTextConfig(DecoderConfig):
    """config.json of HRM-Text.

    num_layers_per_stack: layers of each stack; by default num_hidden_layers, which otherwise counts
    all runs. embedding_scale: by default 1 / initializer_range.
    """

    ALIASES: ClassVar[Mapping[str, str]] = {"H_cycles": "high_cycles", "L_cycles": "low_cycles"}

    high_cycles: int = size(2)
    low_cycles: int = size(3)
    num_layers_per_stack: int | None = size(None)
    initializer_range: float = 0.02
    embedding_scale: float | None = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not self.embedding_scale and not self.initializer_range > 0:
            raise ValueError(f"initializer_range: {self.initializer_range} is not above 0")

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads

    @property
    def depth(self) -> int:
        """Layers of a stack."""
        return self.num_layers_per_stack or self.num_hidden_layers

    @property
    def scale(self) -> float:
        """Factor of embeddings."""
        return self.embedding_scale or 1 / self.initializer_range


class CycledAttention(Attention):
    """Attention with a gate and a cache for each run; `select` chooses the run."""

    def __init__(self, c: HrmTextConfig, b: Builder, runs: int) -> None:
        self.runs = runs
        super().__init__(
            b,
            hidden=c.hidden_size,
            heads=c.heads,
            kv_heads=c.heads,
            head_dim=c.head_size,
            rope=c.rope(),
            bias=c.attention_bias,
            out_bias=c.attention_bias,
            gate="gate_proj",
        )

    def make_cache(
        self, b: Builder, spec: AttentionSpec, kv_heads: int, names: AttentionNames
    ) -> None:
        """Register the caches of all runs."""
        super().make_cache(b, spec, kv_heads, names)
        copies = max(b.shared.mesh.tensor.size // kv_heads, 1)
        more = range(1, self.runs)
        self.run_caches = [self.cache] + [
            b.at(f"run_{run}").attention_cache(spec, copies=copies)[0] for run in more
        ]

    def select(self, run: int) -> None:
        """Make `run` the current one."""
        self.cache = self.run_caches[run]


class HrmTextLayer(PreNormLayer):
    """The pre-norm block, whose norms have no weights."""

    attn: CycledAttention

    def __init__(self, c: HrmTextConfig, b: Builder, runs: int) -> None:
        super().__init__(
            RMSNorm(b.ops, c.rms_norm_eps),
            CycledAttention(c, b.at("self_attn"), runs),
            RMSNorm(b.ops, c.rms_norm_eps),
            standard_mlp(c, b),
        )
        self.ops = b.ops

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x: [tokens, hidden]; the branches are added at once, because the norms are not fused."""
        x = self.ops.add(x, self.attn(self.attn_norm(x), batch))
        return self.ops.add(x, self.mlp(self.mlp_norm(x))), None


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split what is stored as one weight: gate, queries, keys, values."""
    for part, rows in zip(("gate", "q", "k", "v"), tensor.chunk(4), strict=True):
        yield name.replace("gqkv_proj", f"{part}_proj"), rows


class HrmTextForCausalLM(DecoderForCausalLM):
    """HRM-Text with a language-model head. `layers` are those of the low stack, then the high."""

    api = 1
    config_type = HrmTextConfig
    names = WeightNames(
        rename=((r"\.attn\.", ".self_attn."),),
        rewrite=(Rewrite(r"\.self_attn\.gqkv_proj\.(weight|bias)$", _parts),),
    )
    start: Tensor

    def __init__(self, config: HrmTextConfig, build: Builder) -> None:
        Module.__init__(self)
        if build.shared.mesh.pipeline.size > 1:
            raise UnsupportedError(
                "pipeline parallelism: not supported yet: HrmTextForCausalLM, whose layers run "
                "several times; use --tensor-parallel-size"
            )
        b, c = build.at(self.root), config
        self.config = config
        self.embed = self.make_embedding(config, b)
        runs = (c.high_cycles * c.low_cycles, c.high_cycles)
        self.layers = ModuleList(
            HrmTextLayer(c, b.at(f"{stack}.layers.{i}"), count)
            for stack, count in zip(_STACKS, runs, strict=True)
            for i in range(c.depth)
        )
        b.parameter("z_L_init", self, "start", (c.hidden_size,))
        self.norm = RMSNorm(b.ops, c.rms_norm_eps)
        self.head = self.make_head(config, build)
        self._caches = tuple(build.shared.caches)

    def make_embedding(self, config: HrmTextConfig, b: Builder) -> Embedding:
        hidden, scale = config.hidden_size, config.scale
        return b.embedding("embed_tokens", config.vocab_size, hidden, scale=scale)

    def forward(self, batch: Batch) -> Tensor:
        c = self.config
        high: Tensor = self.embed(batch)
        low = self.start.to(high.dtype).expand_as(high)
        low_run = 0
        for high_run in range(c.high_cycles):
            for _ in range(c.low_cycles):
                low = self._stack(0, low + high, batch, low_run)
                low_run += 1
            high = self._stack(1, high + low, batch, high_run)
        return high

    def _stack(self, which: int, x: Tensor, batch: Batch, run: int) -> Tensor:
        """Run one stack and its norm: [tokens, hidden]."""
        for layer in self.layers[which * self.config.depth :][: self.config.depth]:
            attention: Any = layer.attn
            attention.select(run)
            x, _ = layer(x, None, batch)
        normed: Tensor = self.norm(x)
        return normed

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return tiny_config(
            "hrm_text", "HrmTextForCausalLM", num_hidden_layers=1, num_key_value_heads=4,
            head_dim=16, H_cycles=2, L_cycles=2, embedding_scale=2.0,
        )  # fmt: skip
