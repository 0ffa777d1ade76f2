"""Attention backend: how a layer attends over a paged cache (group `modulm.attention`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch

    from modulm.contracts.ops import Ops
    from modulm.contracts.platform import Platform

__all__ = ["API", "AttentionBackend", "AttentionSpec", "KVLayout", "StepLayout"]

API = 2


@frozen
class AttentionSpec:
    """What one attention layer needs. Layers with equal specs share one backend object.

    `latent` is the rank of a compressed cache (multi-head latent attention, DeepSeek-V2, arXiv
    2405.04434): then one head of `latent + rope` values per token is kept and values are read
    from its first `latent` entries. 0 means keys and values are kept as they are.

    `kv_dtype` is a torch dtype by name. Floats are kept rounded to it. In "int8" a token's key,
    and so its value, is kept per head as integers times max |x| / 127.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: str
    kv_dtype: str
    value_dim: int | None = None
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    causal: bool = True
    latent: int = 0


@frozen
class KVLayout:
    """The cache tensor of one layer for a pool of blocks: allocated zeroed, owned by the engine."""

    shape: tuple[int, ...]
    dtype: str
    block_bytes: int


@frozen
class StepLayout:
    """Where the tokens of one step lie, for one cache group (numpy, on the host).

    block_tables: [rows, blocks] int32, ids into the pool; entries past a row's length and blocks
    that fell out of a window are 0, the null block. query_starts: [rows + 1] int32, offsets into
    the step's tokens. context_lens: [rows] int32, cached tokens of the row *including* those of
    this step. slots: [tokens] int64, block id * block size + offset for each token of the step.
    """

    block_size: int
    block_tables: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    slots: np.ndarray


class AttentionBackend(ABC):
    """Attention over paged memory for all layers of one spec."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    @classmethod
    @abstractmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        """A reason why this backend cannot run `spec` on `platform`, or None if it can.

        `ops` is the table that the model will run on; `ops.providers` says whose kernels are in
        it, for a backend that needs those of one provider.
        """

    @classmethod
    def block_sizes(cls, spec: AttentionSpec) -> tuple[int, ...]:
        """Block sizes in tokens that work, best first; empty when any size does."""
        return ()

    def __init__(
        self,
        spec: AttentionSpec,
        platform: Platform,
        ops: Ops,
        block_size: int,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = spec
        self.platform = platform
        self.ops = ops
        self.block_size = block_size

    @abstractmethod
    def layout(self, blocks: int) -> KVLayout:
        """The cache tensor that one layer needs for a pool of `blocks` blocks."""

    @abstractmethod
    def plan(self, step: StepLayout) -> Any:
        """Prepare one step, once for all layers of the spec. The result is opaque to the core."""

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: torch.Tensor,
        plan: Any,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        alibi: torch.Tensor | None = None,
    ) -> None:
        """Write k and v to the cache, attend, and fill `out`.

        q, out: [tokens, heads, head_dim]; k: [tokens, kv_heads, head_dim]; v: [tokens, kv_heads,
        value_dim]; sinks, alibi: [heads] fp32. Rows may be of any mix of lengths. With a latent
        spec, q is [tokens, heads, latent + rope], k [tokens, 1, latent + rope], v is ignored and
        out is [tokens, heads, latent].
        """

    def forward_qkv(
        self,
        qkv: torch.Tensor,
        prepare: Mapping[str, Any],
        cache: torch.Tensor,
        plan: Any,
        out: torch.Tensor,
    ) -> bool:
        """Optionally do split, per-head norm, rotary, cache write and attention in one go.

        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]. `prepare` holds q_norm, k_norm (tensors
        or None), eps, norm_offset, cos_sin, positions, neox. Returns False, having touched
        nothing, when the backend does not fuse this; then the layer does the steps itself.
        """
        return False

    def copy_blocks(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks inside a layer's cache; source, target: [n] int64 block ids."""
        cache[target] = cache[source]
