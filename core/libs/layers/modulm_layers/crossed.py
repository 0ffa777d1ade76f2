"""Cross attention: decoders that read an encoder's output (arXiv 1706.03762, section 3.2.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Module

from modulm.contracts.attention import AttentionSpec
from modulm_layers.attention import Attention, AttentionNames
from modulm_layers.mlp import PlainMLP

if TYPE_CHECKING:
    from modulm.contracts.model import Batch
    from modulm.nn.builder import Builder
    from modulm.nn.norm import Norm

__all__ = ["CrossAttention", "CrossedLayer"]

_NAMES = AttentionNames(out="out_proj")


class CrossAttention(Module):
    """Attention to the encoder output of the row.

    Keys and values are computed from `Batch.encoded` in the row's first step and cached. The output
    is zero for rows without encoder output.

    longest: maximum number of encoder positions. encoded: width of the encoder output; None means
    `hidden`. kv_heads, qk_norm, scale: as in `Attention`.
    """

    q_norm: Norm | None
    k_norm: Norm | None

    def __init__(
        self,
        b: Builder,
        *,
        hidden: int,
        heads: int,
        head_dim: int,
        longest: int,
        encoded: int | None = None,
        kv_heads: int | None = None,
        qk_norm: tuple[Norm, Norm] | None = None,
        bias: bool = True,
        scale: float | None = None,
        names: AttentionNames = _NAMES,
    ) -> None:
        super().__init__()
        self.heads = b.shared.mesh.tensor.part(heads, f"attention heads of {b.prefix}")
        self.head_dim = head_dim
        self.kv_heads = b.share(kv_heads or heads, 1)
        self.q_norm, self.k_norm = qk_norm or (None, None)
        q_size, kv_size = heads * head_dim, (kv_heads or heads) * head_dim
        self.q = b.linear(names.q, hidden, q_size, bias=bias)
        parts = {names.k: kv_size, names.v: kv_size}
        self.kv = b.linear("kv_proj", encoded or hidden, parts, bias=bias, least=head_dim)
        self.out = b.row_linear(names.out, q_size, hidden, bias=bias)
        self.cache, self.backend = b.attention_cache(
            AttentionSpec(
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5 if scale is None else scale,
                dtype=b.dtype,
                kv_dtype=b.shared.kv_dtype,
                cross=longest,
            )
        )

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        q = self.q(x).view(len(x), self.heads, self.head_dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        k = v = q[:0, : self.kv_heads]
        if batch.encoded is not None:
            projected = self.kv(batch.encoded.to(x.dtype))
            k, v = projected.view(len(projected), 2, self.kv_heads, self.head_dim).unbind(1)
            if self.k_norm is not None:
                k = self.k_norm(k.contiguous())
        out = q.new_empty(q.shape)
        self.backend.forward(q, k, v, batch.caches[self.cache], batch.plan(self.cache), out)
        attended: Tensor = self.out(out.flatten(1))
        return attended


class CrossedLayer(Module):
    """Self-attention, cross-attention and feed-forward block, each added to the stream.

    Norms precede the branches; if `before` is false, they follow the additions.
    """

    def __init__(
        self,
        b: Builder,
        *,
        hidden: int,
        heads: int,
        inner: int,
        act: str,
        longest: int,
        before: bool = True,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.ops, self.before, size = b.ops, before, hidden // heads
        self.attn = Attention(
            b.at("self_attn"), hidden=hidden, heads=heads, kv_heads=heads, head_dim=size,
            bias=True, out_bias=True, names=_NAMES,
        )  # fmt: skip
        self.attn_norm = b.layer_norm("self_attn_layer_norm", hidden, eps)
        at = b.at("encoder_attn")
        self.cross = CrossAttention(at, hidden=hidden, heads=heads, head_dim=size, longest=longest)
        self.cross_norm = b.layer_norm("encoder_attn_layer_norm", hidden, eps)
        self.mlp = PlainMLP(b, hidden, inner, act, up="fc1", down="fc2")
        self.mlp_norm = b.layer_norm("final_layer_norm", hidden, eps)

    def forward(
        self, x: Tensor, residual: Tensor | None, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """x, residual: [tokens, hidden]."""
        if not self.before:
            x = self.attn_norm(self.ops.add(x, self.attn(x, batch)))
            x = self.cross_norm(self.ops.add(x, self.cross(x, batch)))
            return self.mlp_norm(self.ops.add(x, self.mlp(x))), None
        x, residual = self.attn_norm.add(x, residual)
        x, residual = self.cross_norm.add(self.attn(x, batch), residual)
        x, residual = self.mlp_norm.add(self.cross(x, batch), residual)
        return self.mlp(x), residual
