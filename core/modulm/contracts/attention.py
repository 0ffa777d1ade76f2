"""Attention backend: how a layer attends over a paged cache (group `modulm.attention`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from attrs import NOTHING, fields, frozen

from modulm.contracts.recording import Recordable
from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch

    from modulm.contracts.ops import Ops
    from modulm.contracts.platform import Platform

__all__ = [
    "API",
    "PLAIN",
    "AttentionBackend",
    "AttentionInputs",
    "AttentionPlan",
    "AttentionSpec",
    "KVLayout",
    "QKVPrepare",
    "StepLayout",
]

API = 3


@frozen
class AttentionSpec:
    """What one attention layer needs. Layers with equal specs share one backend object.

    latent: rank of a compressed cache (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434).
    One head of `latent + rope` values per token is cached; its first `latent` entries are the
    values. 0: keys and values are cached separately.

    kv_dtype: name of a torch dtype, or of a format that the backend defines. Floats are rounded to
    it. "int8" stores keys and values per token and head as integers times max |x| / 127, "int4"
    times max |x| / 7. `rejects` refuses names that the backend does not know. With `scales`, keys
    are divided by `AttentionInputs.k_scale` and values by `v_scale` before they are stored.

    Fields with a default are features, see `features`. `sinks`, `alibi`, `biases` and `scales`
    require tensors of AttentionInputs. So does `selection`: queries see only selected runs of that
    many tokens of their row (sparse attention). `spans` and `masks` require fields of StepLayout.
    With `cross`, the keys are the `StepLayout.encoder_lens` encoder tokens of the row, at most
    `cross`, and queries see all of them.

    A layer with `picks` does not attend. It caches one key per token and no value, and returns for
    each query the `picks` tokens with the largest sums over heads of `AttentionInputs.head_weights`
    times max(0, scale q k), earlier ones first on ties (the indexer of DeepSeek Sparse Attention,
    2025).

    With `partial`, the cache stores only some of each row's tokens. `StepLayout.visible` says how
    many of them each query sees, and `AttentionInputs.lse` is filled so that partial results can be
    merged. It may be combined only with `value_dim`, `softcap`, `latent` and `scales`.
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
    scales: bool = False
    selection: int = 0
    spans: bool = False
    cross: int = 0
    picks: int = 0
    biases: bool = False
    partial: bool = False
    masks: bool = False

    @property
    def features(self) -> frozenset[str]:
        """Names of the optional fields that this layer uses."""
        return frozenset(
            field.name
            for field in fields(AttentionSpec)
            if field.default is not NOTHING and getattr(self, field.name) != field.default
        )


@frozen
class KVLayout:
    """The cache tensor of one layer for a pool of blocks. The engine allocates it zeroed."""

    shape: tuple[int, ...]
    dtype: str
    block_bytes: int


@frozen
class StepLayout:
    """Cache positions of one step's tokens, for one cache group (numpy, on the host).

    block_tables: [rows, blocks] int32, block ids; 0, the null block, past a row's length and for
    blocks that left a sliding window. query_starts: [rows + 1] int32, offsets into the step's
    tokens. context_lens: [rows] int32, cached tokens of the row *including* those of this step.
    slots: [tokens] int64, block id * block size + offset of each token of the step.

    spans: [n, 3] int32 of (row index in the step, first position, end): tokens of the row that see
    each other in both directions (an image in a prompt). A step never contains part of a span.
    masks: row index in the step -> [queries, queries] bool, for rows that are not causal within the
    step (a tree of drafts, a block that is revised): which of the row's tokens (columns) each token
    sees. Every token sees itself and all tokens cached before the step. encoder_lens: [rows] int32,
    encoder tokens of each row, for cross attention; block_tables then refer to encoder tokens, and
    slots has one entry per new key, possibly none.

    visible: [tokens] int32, for `partial`: how many of the row's first cached tokens each query
    sees, possibly none. context_lens then count the tokens stored on this rank; other tokens have
    slots in the null block.
    """

    block_size: int
    block_tables: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    slots: np.ndarray
    spans: np.ndarray | None = None
    encoder_lens: np.ndarray | None = None
    visible: np.ndarray | None = None
    masks: Mapping[int, np.ndarray] | None = None
    #: The former name of `visible`.
    seen = property(lambda self: self.visible)


class AttentionPlan(Recordable):
    """What a backend prepares for one step, shared by all layers of a spec.

    Only the backend reads it; recorders use the methods of `Recordable`.
    """


@frozen(eq=False)
class AttentionInputs:
    """Inputs of attention besides queries, keys and values, as declared by the spec.

    sinks, alibi: [heads] fp32. biases: [heads, n] fp32, added to scores by the distance from query
    to key; distances of n or more use the last entry, keys after the query the first. k_scale,
    v_scale: [1] or [kv_heads] fp32, see `AttentionSpec`. selected: [tokens, kv_heads or 1, n]
    int32, indices of the runs of `spec.selection` tokens that a query sees (as far as it may see
    them), no duplicates; -1: no run. head_weights: [tokens, heads] fp32, for specs with `picks`.
    lse: [tokens, heads] fp32, for specs with `partial`; filled with the log-sum-exp of each query's
    scores, or -inf (and 0 in `out`) if it saw no key. A layer whose inputs are all constant builds
    this value once.
    """

    sinks: torch.Tensor | None = None
    alibi: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    head_weights: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    lse: torch.Tensor | None = None


#: No additional inputs.
PLAIN = AttentionInputs()


@frozen(eq=False)
class QKVPrepare:
    """How a layer transforms queries and keys between projection and attention.

    q_norm, k_norm: [head_dim], weights of an RMS norm per head, without `norm_offset`; or None.
    cos_sin: [positions, rotated dimensions] or None, see the op `rotary`.
    """

    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    norm_offset: float = 0.0
    cos_sin: torch.Tensor | None = None
    neox: bool = True


class AttentionBackend(ABC):
    """Attention over a paged KV cache, for all layers of one spec."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: Optional fields of AttentionSpec that the backend supports. Layers that use others are
    #: rejected, so that fields of later versions are never ignored.
    features: ClassVar[frozenset[str]] = frozenset()
    #: Whether the bits of a token's result do not depend on what else is in the step.
    batch_invariant: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        """Return why this backend cannot run `spec` on `platform`, or None if it can.

        `spec` uses no feature beyond `features`. `ops` are the model's ops; a backend that needs
        the kernels of one provider checks `ops.providers`.
        """

    @classmethod
    def refuses(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        """Return why the backend cannot be chosen: an unsupported feature, or from `rejects`."""
        unknown = sorted(spec.features - cls.features)
        if unknown:
            return f"does not do {', '.join(unknown)}"
        return cls.rejects(spec, platform, ops)

    @classmethod
    def block_sizes(cls, spec: AttentionSpec) -> tuple[int, ...]:
        """Return supported block sizes in tokens, best first; empty: any size."""
        return ()

    def __init__(
        self,
        spec: AttentionSpec,
        platform: Platform,
        ops: Ops,
        block_size: int,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self.spec = spec
        self.platform = platform
        self.ops = ops
        self.block_size = block_size

    @abstractmethod
    def layout(self, blocks: int) -> KVLayout:
        """Return the shape of one layer's cache tensor for a pool of `blocks` blocks."""

    @abstractmethod
    def plan(self, step: StepLayout) -> AttentionPlan:
        """Prepare one step, once for all layers of the spec."""

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: torch.Tensor,
        plan: AttentionPlan,
        out: torch.Tensor,
        inputs: AttentionInputs = PLAIN,
    ) -> None:
        """Write k and v to the cache, attend, and fill `out`.

        q, out: [tokens, heads, head_dim]; k: [tokens, kv_heads, head_dim]; v: [tokens, kv_heads,
        value_dim]; plan: from `plan`. Rows may have any lengths. With `latent`, q is [tokens,
        heads, latent + rope], k [tokens, 1, latent + rope], v is ignored and out is [tokens, heads,
        latent]. With `cross`, k and v belong to encoder tokens. With `picks`, v is ignored and out
        is [tokens, 1, picks] int32: ascending positions in the row, padded in front with -1.
        """

    def forward_qkv(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        prepare: QKVPrepare,
        cache: torch.Tensor,
        plan: AttentionPlan,
        out: torch.Tensor,
        inputs: AttentionInputs = PLAIN,
    ) -> bool:
        """Split, normalize and rotate q and k, write the cache and attend in one fused call.

        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]; positions: [tokens] int64. Returns False
        without side effects if the backend does not fuse this; the layer then runs single steps.
        """
        return False

    def copy_blocks(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks inside a layer's cache; source, target: [n] int64 block ids."""
        cache[target] = cache[source]

    def copy_slots(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy single tokens inside a layer's cache.

        source, target: [n] int64, slots as in `StepLayout.slots`. All sources are read before any
        target is written. Backends that support `masks` must implement it; others raise
        UnsupportedError.
        """
        raise UnsupportedError(f"attention backend {self.name} does not copy single tokens")
