"""DeepSeek-V3.2 (2025) and GLM 5 (Z.ai, 2026): latent attention over tokens selected by an indexer.

DeepSeek Sparse Attention is described in the report of DeepSeek-V3.2-Exp. Its code rotates index
queries and keys by a Hadamard matrix, which changes no product, and rounds them to fp8; as in
transformers, both are omitted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from attrs import evolve, field, frozen, validators
from torch import Tensor
from torch.nn import Module

from modulm.contracts.attention import PLAIN, AttentionInputs, AttentionSpec
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Builder
from modulm_deepseek.deepseek_v2 import (
    DeepseekForCausalLM,
    DeepseekLayer,
    latent_settings,
    tiny_deepseek,
)
from modulm_deepseek.deepseek_v3 import DeepseekV3Config
from modulm_layers import LatentAttention, Rope, size

__all__ = [
    "DeepseekV32Config",
    "DeepseekV32ForCausalLM",
    "DeepseekV32Layer",
    "GlmMoeDsaConfig",
    "GlmMoeDsaForCausalLM",
    "Indexer",
    "SparseLatentAttention",
]


@frozen(kw_only=True)
class DeepseekV32Config(DeepseekV3Config):
    """config.json of DeepSeek-V3.2; a query attends to `index_topk` tokens."""

    #: Whether the indexer rotates halves of a head instead of adjacent dimensions.
    INDEX_NEOX: ClassVar[bool] = True

    q_lora_rank: int = size(1536)
    rope_interleave: bool = field(default=True, validator=validators.in_((True,)))
    first_k_dense_replace: int = size(3, least=0)
    n_group: int = size(8)
    topk_group: int = size(4)
    index_topk: int = size(2048)
    index_head_dim: int = size(128)
    index_n_heads: int = size(64)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim: {self.index_head_dim} of which {self.qk_rope_head_dim} are "
                "rotated"
            )

    def picks(self, index: int) -> bool:
        """Whether layer `index` has an indexer; others reuse the selection of the layer before."""
        return True


@frozen(kw_only=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    """config.json of GLM 5: `indexer_types` ("full", "shared") says which layers have an indexer.

    Without it, `index_topk_pattern` (F and S) or a frequency and an offset decide.
    """

    INDEX_NEOX: ClassVar[bool] = False

    q_lora_rank: int = size(2048)
    rms_norm_eps: float = 1e-5
    n_group: int = size(1)
    topk_group: int = size(1)
    index_n_heads: int = size(32)
    indexer_types: tuple[str, ...] | None = None
    index_topk_pattern: str | None = None
    index_topk_freq: int = size(1)
    index_skip_topk_offset: int = size(2, least=0)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        for key in ("indexer_types", "index_topk_pattern"):
            entries = {"indexer_types": self.indexer_types, "index_topk_pattern": self.pattern}[key]
            if entries is not None and len(entries) != self.num_hidden_layers:
                raise ValueError(
                    f"{key}: {len(entries)} entries for {self.num_hidden_layers} layers"
                )
        if not self.picks(0):
            raise ValueError("indexer_types: the first layer has no indexer to share")

    @property
    def pattern(self) -> str | None:
        """`index_topk_pattern`, unless `indexer_types` is set."""
        return self.index_topk_pattern if self.indexer_types is None else None

    def picks(self, index: int) -> bool:
        if self.indexer_types is not None:
            return self.indexer_types[index] == "full"
        if self.pattern is not None:
            return self.pattern[index] == "F"
        return max(index - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0


class Indexer(Module):
    """Selects the tokens that each query attends to, with small heads and cached keys.

    `follows`: the attention layer whose block table locates the keys. `b` points at it.
    """

    def __init__(self, c: DeepseekV32Config, b: Builder, follows: str) -> None:
        super().__init__()
        heads, width = c.index_n_heads, c.index_head_dim
        self.heads, self.ops, self.picks = heads, b.ops, c.index_topk
        rope: Rope = evolve(c.rope(), neox=c.INDEX_NEOX)
        self.rotation = b.rope(rope)
        self.q = b.linear("wq_b", c.q_lora_rank, heads * width, split=False)
        self.k = b.linear("wk", c.hidden_size, width, split=False)
        self.k_norm = b.layer_norm("k_norm", width, 1e-6)
        self.weights = b.router("weights_proj", c.hidden_size, heads, wide=True)
        spec = AttentionSpec(
            heads=heads,
            kv_heads=1,
            head_dim=width,
            scale=width**-0.5 * heads**-0.5,
            dtype=b.dtype,
            kv_dtype=b.shared.kv_dtype,
            picks=c.index_topk,
        )
        self.cache, self.backend = b.attention_cache(spec, follows=follows)
        #: The selection of this step, for the layers that share it.
        self.picked = PLAIN

    def arrange(self, x: Tensor) -> Tensor:
        """Return heads with their rotated dimensions first; x: [..., head_dim]."""
        return x

    def forward(self, x: Tensor, compressed: Tensor, batch: Batch) -> AttentionInputs:
        """Select tokens. x: [tokens, hidden]; compressed: [tokens, q rank], the layer's compressed
        queries.
        """
        q = self.arrange(torch.unflatten(self.q(compressed), -1, (self.heads, -1))).contiguous()
        k = self.arrange(self.k_norm(self.k(x))).unsqueeze(1)
        self.ops.rotary(q, k, batch.positions, self.rotation.cos_sin, self.rotation.rope.neox)
        selected = q.new_empty(q.shape[0], 1, self.picks, dtype=torch.int32)
        brought = AttentionInputs(head_weights=self.weights(x).float())
        cache, plan = batch.caches[self.cache], batch.plan(self.cache)
        self.backend.forward(q, k, k, cache, plan, selected, brought)
        self.picked = AttentionInputs(selected=selected)
        return self.picked


class SparseLatentAttention(LatentAttention):
    """Latent attention over the tokens selected by an indexer: its own or a previous layer's."""

    indexer_type: ClassVar[type[Indexer]] = Indexer

    def __init__(self, c: DeepseekV32Config, b: Builder, index: int) -> None:
        super().__init__(b, **latent_settings(c), selection=1)
        own = c.picks(index)
        self.indexer = self.indexer_type(c, b.at("indexer"), b.prefix) if own else None
        self._source: tuple[Indexer, ...] = ()

    def share(self, before: Indexer | None) -> Indexer:
        """Return the indexer whose selection this layer uses: its own, or the one before.

        Raises UnsupportedError if there is neither.
        """
        indexer = self.indexer or before
        if indexer is None:
            raise UnsupportedError(
                "pipeline parallelism: not supported yet: a stage that starts with a shared indexer"
            )
        self._source = (indexer,)
        return indexer

    def selection(self, x: Tensor, compressed: Tensor, batch: Batch) -> AttentionInputs:
        if self.indexer is not None:
            return self.indexer(x, compressed, batch)
        return self._source[0].picked


class DeepseekV32Layer(DeepseekLayer):
    """The pre-norm block with sparse attention."""

    attn: SparseLatentAttention

    def __init__(self, c: DeepseekV32Config, b: Builder, index: int) -> None:
        super().__init__(c, b, index, SparseLatentAttention(c, b.at("self_attn"), index))


class DeepseekV32ForCausalLM(DeepseekForCausalLM):
    """DeepSeek-V3.2 with a language-model head."""

    api = 1
    config_type = DeepseekV32Config
    layer = DeepseekV32Layer

    def __init__(self, config: DeepseekV32Config, build: Builder) -> None:
        super().__init__(config, build)
        before: Indexer | None = None
        for layer in self.layers:
            before = layer.attn.share(before)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        return _tiny("deepseek_v32", "DeepseekV32ForCausalLM")


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM 5 with a language-model head."""

    config_type = GlmMoeDsaConfig

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        kinds = ["full", "full", "shared", "full"]
        changes = {"num_hidden_layers": 4, "indexer_types": kinds}
        return _tiny("glm_moe_dsa", "GlmMoeDsaForCausalLM", **changes)


def _tiny(model_type: str, architecture: str, **changes: Any) -> Mapping[str, Any]:
    """A tiny config whose queries attend to 6 tokens, so that most prompts require a selection."""
    settings = {"q_lora_rank": 40, "index_topk": 6, "index_head_dim": 32, "index_n_heads": 16}
    return tiny_deepseek(model_type, architecture, **{**settings, **changes})
