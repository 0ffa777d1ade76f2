"""Multi-head latent attention (MLA): all heads share one small cached vector per token."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from attrs import evolve
from torch import Tensor
from torch.nn import Module, Parameter

from modulm.contracts.attention import PLAIN, AttentionInputs, AttentionSpec
from modulm_layers.kv_scales import K_LARGEST, calculated_scale, scale_names, take_scales

if TYPE_CHECKING:
    from modulm.contracts.model import Batch
    from modulm.nn.builder import Builder
    from modulm.nn.linear import Linear
    from modulm_layers.rope import Rope

__all__ = ["LatentAttention"]


class LatentAttention(Module):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1).

    The cache has `rank` numbers per token, from which every head's key (`nope` dimensions) and
    value (`value` dimensions) are linear maps, plus `rope.size` rotated dimensions that all heads'
    keys share. The maps are absorbed: queries go through the transposed key map before attention
    and its output through the value map, so keys and values of single heads are never computed from
    the cache.

    `q_rank` also compresses the input of the queries. `eps` belongs to the norms of the compressed
    vectors. `selection`: see `AttentionSpec`; subclasses that select tokens implement it.
    """

    up_k: Tensor
    up_v: Tensor
    k_scale: Tensor | None

    def __init__(
        self,
        b: Builder,
        *,
        hidden: int,
        heads: int,
        rank: int,
        nope: int,
        value: int,
        rope: Rope,
        q_rank: int | None = None,
        bias: bool = False,
        eps: float = 1e-6,
        selection: int = 0,
    ) -> None:
        super().__init__()
        self.heads = b.shared.mesh.tensor.part(heads, f"attention heads of {b.prefix}")
        self.rank, self.nope, self.q_rank = rank, nope, q_rank
        self.ops, self.rotation, self.neox = b.ops, b.rope(rope), rope.neox
        self._make_inputs(b, hidden, rank + rope.size, heads * (nope + rope.size), bias, eps)
        self.kv_norm = b.rms_norm("kv_a_layernorm", rank, eps)
        up = b.linear("kv_b_proj", rank, heads * (nope + value))
        b.after(up, partial(self._absorb, up))
        for name in ("up_k", "up_v"):
            self.register_buffer(name, None, persistent=False)
        self.out = b.row_linear("o_proj", heads * value, hidden, bias=bias)
        spec = AttentionSpec(
            heads=self.heads,
            kv_heads=1,
            head_dim=rank + rope.size,
            scale=(nope + rope.size) ** -0.5 * rope.score_factor,
            dtype=b.dtype,
            kv_dtype=b.shared.kv_dtype,
            latent=rank,
            selection=selection,
            scales=b.shared.kv_dtype.startswith("float8"),
        )
        self.make_cache(b, spec)

    def make_cache(self, b: Builder, spec: AttentionSpec) -> None:
        """Register the layer's cache and the scale of its values."""
        self.cache, self.backend = b.attention_cache(spec, copies=b.ranks)
        self.register_parameter("k_scale", None)
        self.finds_scales = self.backend.spec.scales and b.shared.calculate_kv_scales
        if self.backend.spec.scales:
            names = scale_names("k", ("kv_a_proj_with_mqa", "kv_b_proj", "mla_attn"))
            take_scales(b, self, "k_scale", 1, names)

    def _make_inputs(
        self, b: Builder, hidden: int, cached: int, queries: int, bias: bool, eps: float
    ) -> None:
        """Make the layers that read the stream; with compressed queries both are one layer."""
        if self.q_rank is None:
            self.q = b.linear("q_proj", hidden, queries)
            self.down = b.linear("kv_a_proj_with_mqa", hidden, cached, bias=bias, split=False)
            return
        parts = {"q_a_proj": self.q_rank, "kv_a_proj_with_mqa": cached}
        self.down = b.linear("qkv_a_proj", hidden, parts, bias=bias, split=False)
        self.q_norm = b.rms_norm("q_a_layernorm", self.q_rank, eps)
        self.q = b.linear("q_b_proj", self.q_rank, queries)

    def _absorb(self, up: Linear) -> None:
        """Take the key and value maps out of `up`.

        up_k: [heads, nope, rank]; up_v: [heads, rank, value].
        """
        maps = torch.unflatten(up.dequantize(), 0, (self.heads, -1))
        k, v = torch.tensor_split(maps, [self.nope], dim=1)
        self.up_k, self.up_v = k.contiguous(), v.transpose(1, 2).contiguous()

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        down = self.down(x)
        compressed = x
        if self.q_rank is not None:
            compressed = self.q_norm(down[:, : self.q_rank])
            down = down[:, self.q_rank :]
        q = self.q(compressed)
        q, k = self.ops.latent_prepare(
            torch.unflatten(q, -1, (self.heads, -1)),
            down,
            self.up_k,
            cast("Tensor", self.kv_norm.weight),
            self.kv_norm.eps,
            self.rotation.cos_sin,
            batch.positions,
            self.neox,
        )
        out = self.attend(q, k, x, compressed, batch)
        return self.project_out(self.ops.each_head(out, self.up_v), x)

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        """Project the heads' outputs; out: [tokens, heads, value], x: the layer's input."""
        attended: Tensor = self.out(out.flatten(1))
        return attended

    def attend(self, q: Tensor, k: Tensor, x: Tensor, compressed: Tensor, batch: Batch) -> Tensor:
        """Attend to the compressed vectors: [tokens, heads, rank].

        q: [tokens, heads, rank + rope]; k: [tokens, 1, rank + rope]; x, compressed: see
        `selection`.
        """
        out = q.new_empty(x.shape[0], self.heads, self.rank)
        cache, plan = batch.caches[self.cache], batch.plan(self.cache)
        if self.finds_scales:
            self.k_scale = Parameter(calculated_scale(k, K_LARGEST), requires_grad=False)
            self.finds_scales = False
        inputs = self.selection(x, compressed, batch)
        if self.k_scale is not None:  # values are part of the keys
            inputs = evolve(inputs, k_scale=self.k_scale, v_scale=self.k_scale)
        self.backend.forward(q, k, k[..., : self.rank], cache, plan, out, inputs)
        return out

    def selection(self, x: Tensor, compressed: Tensor, batch: Batch) -> AttentionInputs:
        """Extra attention inputs: the selected tokens, for layers with a `selection`.

        x: [tokens, hidden]; compressed: [tokens, q_rank], the compressed query input.
        """
        return PLAIN
