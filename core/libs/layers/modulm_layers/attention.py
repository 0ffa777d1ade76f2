"""The attention layer: projections, norms and rotation. The backend owns the cache and attends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from attrs import astuple, evolve, frozen
from torch import Tensor
from torch.nn import Module, Parameter

from modulm.contracts.attention import PLAIN, AttentionInputs, AttentionSpec, QKVPrepare
from modulm.errors import UnsupportedError
from modulm.nn.norm import Norm, RMSNorm
from modulm_layers.kv_scales import (
    K_LARGEST,
    V_LARGEST,
    calculated_scale,
    scale_names,
    take_scales,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm.contracts.model import Batch
    from modulm.nn.builder import Builder
    from modulm_layers.relative import RelativePositions
    from modulm_layers.rope import Rope

__all__ = ["Attention", "AttentionNames", "alibi_slopes"]


@frozen
class AttentionNames:
    """Names of an attention layer's weights in a checkpoint; `qkv` names the fused layer."""

    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"
    out: str = "o_proj"
    qkv: str = "qkv_proj"


_NAMES = AttentionNames()


class Attention(Module):
    """Multi-head attention with grouped keys and values (Ainslie et al., arXiv 2305.13245).

    Arguments add what individual families need:

    - `rope`: rotary positions.
    - `qk_norm`: norms of queries and keys before the rotation (after it with `norm_last`), per
      head, or over all heads at once with `norm_whole`.
    - `window`: number of tokens a query sees, itself included.
    - `softcap`: bounds the scores by tanh.
    - `sinks`: adds a learned score per head for a token without a value.
    - `alibi`: multiplies the standard slopes; 0 turns ALiBi off.
    - `relative`: relative positions, added to the scores.
    - `clip`: bounds the projections, after their norms if these are over all heads.
    - `gate`: names a projection of the input whose sigmoid scales the attention output.
    - `scale`: multiplies the scores; None means 1 / sqrt(head_dim).
    - `value_dim`: dimensions of a head's values; None means head_dim.
    - `outputs`: dimensions of the result; None means hidden.
    """

    sinks: Tensor | None
    alibi: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    q_norm: Norm | None
    k_norm: Norm | None

    def __init__(
        self,
        b: Builder,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope | None = None,
        bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
        window: int | None = None,
        softcap: float = 0.0,
        sinks: bool = False,
        alibi: float = 0.0,
        relative: RelativePositions | None = None,
        clip: float | None = None,
        qk_norm: tuple[Norm, Norm] | None = None,
        norm_whole: bool = False,
        norm_last: bool = False,
        gate: str | None = None,
        value_dim: int | None = None,
        outputs: int | None = None,
        names: AttentionNames = _NAMES,
    ) -> None:
        super().__init__()
        value_dim = value_dim or head_dim
        group = b.shared.mesh.tensor
        self.heads = group.part(heads, f"attention heads of {b.prefix}")
        self.kv_heads = b.share(kv_heads, 1)
        self.group = group if norm_whole and group.size > 1 else None
        if self.group is not None and kv_heads < group.size:
            raise UnsupportedError(
                f"tensor_parallel_size: {b.prefix}: keys are normed over all {kv_heads} heads, "
                f"so at most {kv_heads} ranks can split them"
            )
        self.head_dim, self.value_dim, self.clip, self.ops = head_dim, value_dim, clip, b.ops
        self.norm_whole, self.norm_last = norm_whole, norm_last
        sizes = {names.q: heads * head_dim, names.k: kv_heads * head_dim}
        sizes[names.v] = kv_heads * value_dim
        least = (head_dim, head_dim, value_dim)
        self.qkv = self.make_inputs(b, hidden, sizes, bias, least, names)
        self.out = b.row_linear(names.out, heads * value_dim, outputs or hidden, bias=out_bias)
        self.gate = None if gate is None else b.linear(gate, hidden, heads * value_dim, bias=bias)
        self.q_norm, self.k_norm = qk_norm or (None, None)
        self.neox = rope is None or rope.neox
        self.rotation = None if rope is None else b.rope(rope)
        self.register_parameter("sinks", None)
        if sinks:
            head_shard = group.shard(heads, b.prefix)
            b.cut_parameter("sinks", self, "sinks", (head_shard,), dtype=torch.float32)
        self.alibi = None
        if alibi:
            slopes = alibi_slopes(heads, group.rank, group.size)
            self.alibi = (alibi * slopes).to(b.shared.device)
        self.relative = relative
        spec = AttentionSpec(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            dtype=b.dtype,
            kv_dtype=b.shared.kv_dtype,
            value_dim=None if value_dim == head_dim else value_dim,
            window=window,
            softcap=softcap,
            sinks=sinks,
            alibi=bool(alibi),
            biases=relative is not None,
            scales=b.shared.kv_dtype.startswith("float8"),
        )
        self.make_cache(b, spec, kv_heads, names)
        plain = value_dim == head_dim and not (clip or norm_whole or norm_last)
        self.fusable = plain and _fusable(qk_norm)
        # Created on the first run, because its tensors exist only after the weights are loaded.
        self._constant: tuple[AttentionInputs, QKVPrepare] | None = None

    def make_inputs(
        self,
        b: Builder,
        hidden: int,
        sizes: Mapping[str, int],
        bias: bool,
        least: tuple[int, int, int],
        names: AttentionNames,
    ) -> Module:
        """Make what computes queries, keys and values, side by side, from the input.

        sizes: of the three, by name; least: see `Builder.linear`.
        """
        return b.linear(names.qkv, hidden, sizes, bias=bias, least=least)

    def make_cache(
        self, b: Builder, spec: AttentionSpec, kv_heads: int, names: AttentionNames
    ) -> None:
        """Register the layer's KV cache and the scales of its values. kv_heads: of all ranks."""
        copies = max(b.shared.mesh.tensor.size // kv_heads, 1)
        self.cache, self.backend = b.attention_cache(spec, copies=copies)
        for vector, part in (("k", names.k), ("v", names.v)):
            self.register_parameter(f"{vector}_scale", None)
            if self.backend.spec.scales:
                stored = scale_names(vector, (part, names.qkv))
                take_scales(b, self, f"{vector}_scale", self.kv_heads, stored)
        self.finds_scales = self.backend.spec.scales and b.shared.calculate_kv_scales

    def forward(self, x: Tensor, batch: Batch, *, only_sampled: bool = False) -> Tensor:
        """x: [tokens, hidden] -> [tokens, outputs]; of the tokens in `batch.sample` alone if so."""
        out = self.attend(x, batch)
        if only_sampled:
            out, x = out[batch.sample], x[batch.sample]
        return self.project_out(out, x)

    def attend(self, x: Tensor, batch: Batch) -> Tensor:
        """Cache keys and values and attend: [tokens, hidden] -> [tokens, heads, value_dim]."""
        qkv = self.qkv(x)
        out: Tensor = qkv.new_empty(x.shape[0], self.heads, self.value_dim)
        cache, plan, positions = batch.caches[self.cache], batch.plan(self.cache), batch.positions
        inputs, prepare = self._constant or self._bind(qkv, positions)
        turn: tuple[Tensor, ...] = (positions,)
        if batch.axis_positions is not None and self.rotation is not None:
            table, positions = self.rotation.of_step(batch)
            turn, prepare = (positions, table), evolve(prepare, cos_sin=table)
        if not (
            self.fusable
            and self.backend.forward_qkv(qkv, positions, prepare, cache, plan, out, inputs)
        ):
            q, k, v = self._project(qkv, *turn)
            self.backend.forward(q, k, v, cache, plan, out, inputs)
        return out

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        """Gate and project the heads' outputs; out: [tokens, heads, value_dim], x: the input."""
        seen = out.flatten(1)
        if self.gate is not None:
            seen = self.ops.multiply(seen, self.gate(x), "sigmoid")
        attended: Tensor = self.out(seen)
        return attended

    def _bind(self, qkv: Tensor, positions: Tensor) -> tuple[AttentionInputs, QKVPrepare]:
        """Create the inputs that the backend gets in every step; qkv is this step's projection."""
        if self.finds_scales:
            _, k, v = self._project(qkv.clone(), positions)
            self.k_scale = Parameter(calculated_scale(k, K_LARGEST), requires_grad=False)
            self.v_scale = Parameter(calculated_scale(v, V_LARGEST), requires_grad=False)
        inputs = AttentionInputs(self.sinks, self.alibi, self.k_scale, self.v_scale)
        if self.relative is not None:
            inputs = evolve(inputs, biases=self.relative.table)
        if all(tensor is None for tensor in astuple(inputs, recurse=False)):
            inputs = PLAIN
        prepare = QKVPrepare(
            cos_sin=None if self.rotation is None else self.rotation.cos_sin, neox=self.neox
        )
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            prepare = evolve(
                prepare,
                q_norm=self.q_norm.weight,
                k_norm=self.k_norm.weight,
                eps=self.q_norm.eps,
                norm_offset=self.q_norm.offset,
            )
        self._constant = inputs, prepare
        return self._constant

    def _project(
        self, qkv: Tensor, positions: Tensor, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values [tokens, heads, head_dim], normed and rotated.

        table: rotation table; None means the layer's own.
        """
        if self.clip is not None and not self.norm_whole:
            qkv = self.ops.clamp(qkv, self.clip)
        heads = (self.heads, self.head_dim), (self.kv_heads, self.head_dim)
        sizes = [count * size for count, size in (*heads, (self.kv_heads, self.value_dim))]
        q, k, v = torch.split(qkv, sizes, dim=-1)
        shape = (qkv.shape[0], -1, self.head_dim)
        if self.norm_whole:
            q, k = self._normed_whole(q, k)
            if self.clip is not None:
                q, k, v = (self.ops.clamp(part.contiguous(), self.clip) for part in (q, k, v))
        q, k = q.reshape(shape), k.reshape(shape)
        v = v.reshape(qkv.shape[0], -1, self.value_dim)
        if not (self.norm_whole or self.norm_last):
            q, k = self._normed(q, k)
        if self.rotation is not None:
            table = self.rotation.cos_sin if table is None else table
            self.ops.rotary(q, k, positions, table, self.neox)
        return (*self._normed(q, k), v) if self.norm_last else (q, k, v)

    def _normed_whole(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Norm over all heads, including those on other ranks."""
        if self.group is None:
            return self._normed(q, k)
        rank, size = self.group.rank, self.group.size
        whole = self._normed(self.group.all_gather(q), self.group.all_gather(k))
        q, k = (x.tensor_split(size, -1)[rank].contiguous() for x in whole)
        return q, k

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)


def alibi_slopes(heads: int, rank: int = 0, ranks: int = 1) -> Tensor:
    """[heads / ranks] fp32: one slope per head (Press et al., arXiv 2108.12409, section 3).

    The slopes are powers of two down to 2^-8. If the number of heads is not a power of two, every
    other slope of the next larger set is appended.
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    count = heads // ranks
    return torch.tensor(slopes[rank * count : (rank + 1) * count], dtype=torch.float32)


def _fusable(norms: tuple[Norm, Norm] | None) -> bool:
    """Whether a backend may apply the norms itself: both are RMS norms with equal settings."""
    if norms is None:
        return True
    q, k = norms
    if not (isinstance(q, RMSNorm) and isinstance(k, RMSNorm)) or q.weight is None:
        return False
    return (q.eps, q.offset) == (k.eps, k.offset)
