"""Multi-head latent attention (MLA): all heads share one small cached vector per token."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

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

    A token keeps `rank` numbers, from which every head's key (`nope` dimensions) and value
    (`value` dimensions) are linear maps, and `rope.size` rotated ones that are part of every
    head's key. The maps are absorbed: queries go through the transpose of the key map before
    they meet the cache, and what attention returns through the value map after, so that neither
    keys nor values of a head are ever made from the cache. `q_rank` compresses the input of the
    queries as well. `eps` is that of the norms of the compressed vectors. `selection`: see
    `AttentionSpec`; a subclass that selects says what.
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
        self.heads = b.shared.mesh.tensor.part(heads, b.prefix)
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
        self.cache, self.backend = b.attention_cache(spec, copies=b.ranks)
        self.register_parameter("k_scale", None)
        self.finds_scales = self.backend.spec.scales and b.shared.calculate_kv_scales
        if self.backend.spec.scales:
            names = scale_names("k", ("kv_a_proj_with_mqa", "kv_b_proj", "mla_attn"))
            take_scales(b, self, "k_scale", 1, names)

    def _make_inputs(
        self, b: Builder, hidden: int, kept: int, queries: int, bias: bool, eps: float
    ) -> None:
        """The layers that read the stream; where queries are compressed both are one."""
        if self.q_rank is None:
            self.q = b.linear("q_proj", hidden, queries)
            self.down = b.linear("kv_a_proj_with_mqa", hidden, kept, bias=bias, split=False)
            return
        parts = {"q_a_proj": self.q_rank, "kv_a_proj_with_mqa": kept}
        self.down = b.linear("qkv_a_proj", hidden, parts, bias=bias, split=False)
        self.q_norm = b.rms_norm("q_a_layernorm", self.q_rank, eps)
        self.q = b.linear("q_b_proj", self.q_rank, queries)

    def _absorb(self, up: Linear) -> None:
        """Take the maps of keys and values out of the layer that held them.

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
        q, norm = torch.unflatten(q, -1, (self.heads, -1)), (self.kv_norm.weight, self.kv_norm.eps)
        turn = (self.rotation.cos_sin, batch.positions, self.neox)
        q, k = self.ops.latent_prepare(q, down, self.up_k, *norm, *turn)
        out = q.new_empty(x.shape[0], self.heads, self.rank)
        cache, plan = batch.caches[self.cache], batch.plan(self.cache)
        if self.finds_scales:
            self.k_scale = Parameter(calculated_scale(k, K_LARGEST), requires_grad=False)
            self.finds_scales = False
        inputs = self.selection(x, compressed, batch)
        if self.k_scale is not None:  # values are a part of the keys
            inputs = evolve(inputs, k_scale=self.k_scale, v_scale=self.k_scale)
        self.backend.forward(q, k, k[..., : self.rank], cache, plan, out, inputs)
        attended: Tensor = self.out(self.ops.each_head(out, self.up_v).flatten(1))
        return attended

    def selection(self, x: Tensor, compressed: Tensor, batch: Batch) -> AttentionInputs:
        """What the layer brings to attention: the tokens chosen, where it has a `selection`.

        x: [tokens, hidden]; compressed: [tokens, q_rank], what queries are made from.
        """
        return PLAIN
