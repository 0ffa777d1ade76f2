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

    `latent` is the rank of a compressed cache (multi-head latent attention, DeepSeek-V2, arXiv
    2405.04434): then one head of `latent + rope` values per token is kept and values are read
    from its first `latent` entries. 0 means keys and values are kept as they are.

    `kv_dtype` is a torch dtype by name. Floats are kept rounded to it. In "int8" a token's key,
    and so its value, is kept per head as integers times max |x| / 127, in "int4" / 7. With
    `scales` a key is kept divided by `AttentionInputs.k_scale`, a value by `v_scale`.

    Fields with a default are features, see `features`. `sinks`, `alibi`, `biases` and `scales`
    announce tensors of AttentionInputs, and so does `selection`: queries see only chosen runs of
    that many tokens of their row (sparse attention). `spans` and `masks` announce those of
    StepLayout. With `cross` the keys are those of the row's encoder, `StepLayout.encoder_lens` of
    them and at most `cross`, and queries see all.

    A layer with `picks` does not attend: it keeps one key per token and no value, and finds for
    each query the `picks` tokens whose sum over heads of `AttentionInputs.head_weights` times
    max(0, scale q k) is the largest, of equal sums the earlier (the indexer of DeepSeek Sparse
    Attention, 2025).

    With `partial` the cache holds some of each row's tokens, `StepLayout.seen` says how many of
    them a query sees, and `AttentionInputs.lse` is filled, so that parts can be merged. It goes
    with `value_dim`, `softcap`, `latent` and `scales`, and with nothing else.
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
        """The optional fields that this layer uses, beyond plain causal attention."""
        return frozenset(
            field.name
            for field in fields(AttentionSpec)
            if field.default is not NOTHING and getattr(self, field.name) != field.default
        )


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

    spans: [n, 3] int32 of (row's place in the step, first position, end): tokens of the row that
    see one another in both directions (an image in a prompt); a step never holds part of one.
    masks: row's place in the step -> [queries, queries] bool, for rows whose tokens of this step do
    not see all tokens before them and none after (a tree of drafts, a block that is revised): which
    of the step's tokens of the row (columns) each of them sees. Each sees itself, and all that was
    cached before the step.
    encoder_lens: [rows] int32, tokens of each row's encoder, for layers of cross attention: then
    block_tables are those of the encoder's tokens, and slots has one entry for each key that the
    step brings, which may be none.

    seen: [tokens] int32, for `partial`: each query sees so many of the first cached tokens of its
    row, maybe none. Then context_lens are those of the tokens that are held, and what is not to be
    held has slots in the null block.
    """

    block_size: int
    block_tables: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray
    slots: np.ndarray
    spans: np.ndarray | None = None
    encoder_lens: np.ndarray | None = None
    seen: np.ndarray | None = None
    masks: Mapping[int, np.ndarray] | None = None


class AttentionPlan(Recordable):
    """What a backend prepared for one step, once for all layers of a spec.

    Only the backend reads it. Recorders ask what `Recordable` says.
    """


@frozen(eq=False)
class AttentionInputs:
    """What a layer brings to attention beside queries, keys and values; the spec announces each.

    sinks, alibi: [heads] fp32. biases: [heads, n] fp32, added to the scores of each head by how far
    before the query a key stands; those n tokens away or more, and those behind the query, have the
    last and the first. k_scale, v_scale: [1] or [kv_heads] fp32, see `AttentionSpec`.
    selected: [tokens, kv_heads or 1, n] int32, numbers of the row's runs of `spec.selection`
    tokens that a query sees (of those it may see at all), none twice, -1 for no run. head_weights:
    [tokens, heads] fp32, for a spec with `picks`. lse: [tokens, heads] fp32, for one with
    `partial`, is filled with the log of the sum of the exponents of what each query saw; -inf, and
    0 in `out`, where that is nothing. A layer whose inputs are all constant makes this value once.
    """

    sinks: torch.Tensor | None = None
    alibi: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    head_weights: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    lse: torch.Tensor | None = None


#: A layer that brings nothing.
PLAIN = AttentionInputs()


@frozen(eq=False)
class QKVPrepare:
    """What happens to queries and keys between projection and attention; constant for a layer.

    q_norm, k_norm: [head_dim], weights of an RMS norm of each head, stored less `norm_offset`, or
    None. cos_sin: [positions, rotated dimensions] or None, see the op `rotary`.
    """

    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    norm_offset: float = 0.0
    cos_sin: torch.Tensor | None = None
    neox: bool = True


class AttentionBackend(ABC):
    """Attention over paged memory for all layers of one spec."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: Optional fields of AttentionSpec that the backend looks at. Layers that use others are
    #: rejected for it, so that a field of a later version is never ignored.
    features: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    @abstractmethod
    def rejects(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        """A reason why this backend cannot run `spec` on `platform`, or None if it can.

        `spec` uses no feature beyond `features`. `ops` is the table that the model will run on;
        `ops.providers` says whose kernels are in it, for a backend that needs those of one
        provider.
        """

    @classmethod
    def refuses(cls, spec: AttentionSpec, platform: Platform, ops: Ops) -> str | None:
        """Why the backend cannot be chosen: a feature it does not know, or what it rejects."""
        unknown = sorted(spec.features - cls.features)
        if unknown:
            return f"does not do {', '.join(unknown)}"
        return cls.rejects(spec, platform, ops)

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
        options: Mapping[str, object] | None = None,
    ) -> None:
        self.spec = spec
        self.platform = platform
        self.ops = ops
        self.block_size = block_size

    @abstractmethod
    def layout(self, blocks: int) -> KVLayout:
        """The cache tensor that one layer needs for a pool of `blocks` blocks."""

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
        value_dim]; `plan` is what `plan` made. Rows may be of any mix of lengths. With a latent
        spec, q is [tokens, heads, latent + rope], k [tokens, 1, latent + rope], v is ignored and
        out is [tokens, heads, latent]. With a cross spec k and v are those of encoders' tokens.
        With a spec that picks, v is ignored and out is [tokens, 1, picks] int32: positions in the
        row in ascending order, after -1 for each that a query which sees fewer lacks.
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
        """Optionally do split, per-head norm, rotary, cache write and attention in one go.

        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]; positions: [tokens] int64. Returns False,
        having touched nothing, when the backend does not fuse this; then the layer does the steps
        itself.
        """
        return False

    def copy_blocks(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks inside a layer's cache; source, target: [n] int64 block ids."""
        cache[target] = cache[source]

    def copy_slots(self, cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy single tokens inside a layer's cache; source, target: [n] int64, slots as in
        `StepLayout.slots`. All are read before any is written. Backends that support `masks` have
        it; others raise UnsupportedError.
        """
        raise UnsupportedError(f"attention backend {self.name} does not copy single tokens")
