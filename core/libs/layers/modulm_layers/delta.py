"""The delta rule with a decay per channel (Kimi Linear, arXiv 2510.26692)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm.contracts.model import StateSpec
from modulm_layers.ssm import CausalConv, recur

if TYPE_CHECKING:
    from modulm.contracts.model import Batch
    from modulm.nn.builder import Builder

__all__ = ["KimiDeltaRule"]


class KimiDeltaRule(Module):
    """A matrix from keys to values per head, whose rows decay at individual rates.

    Each token decays the matrix, reads the value stored for its key and moves it towards its own
    value. Prompts are processed token by token. full_rank: decays and output gates are single maps
    of the input instead of products of two. bound: the logarithm of the strongest decay of a token,
    approached by a sigmoid; None means no bound.
    """

    a_log: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        b: Builder,
        *,
        hidden: int,
        heads: int,
        head_dim: int,
        width: int,
        eps: float,
        act: str = "silu",
        full_rank: bool = False,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        self.size, self.bound, self.full_rank = head_dim, bound, full_rank
        inner, head_shard = heads * head_dim, b.shard(heads)
        self.heads, self.rank_heads = (
            head_shard.size,
            slice(head_shard.start, head_shard.start + head_shard.size),
        )
        sizes = {f"{n}_proj": inner for n in "qkv"}
        self.qkv = b.linear("qkv_proj", hidden, sizes, least=head_dim)
        convs = [CausalConv(b, f"{n}_conv1d", inner, width, bias=False, act=act) for n in "qkv"]
        self.convs = ModuleList(convs)
        if full_rank:
            self.narrow = b.linear("b_proj", hidden, heads, split=False)
            self.fade, self.gate = (
                b.linear(f"{n}_proj", hidden, inner, least=head_dim) for n in ("f", "g")
            )
        else:
            narrow = {"f_a_proj": head_dim, "g_a_proj": head_dim, "b_proj": heads}
            self.parts = list(narrow.values())
            self.narrow = b.linear("narrow_proj", hidden, narrow, split=False)
            self.fade, self.gate = (b.linear(f"{n}_b_proj", head_dim, inner) for n in ("f", "g"))
        b.cut_parameter("A_log", self, "a_log", (head_shard,), dtype=torch.float32)
        b.cut_parameter("dt_bias", self, "dt_bias", (b.shard(inner),), dtype=torch.float32)
        self.norm = b.rms_norm("o_norm", head_dim, eps)
        self.out = b.row_linear("o_proj", inner, hidden)
        conv_states = (
            (f"conv_{n}", conv.state, b.dtype) for n, conv in zip("qkv", convs, strict=True)
        )
        state = ("state", (self.heads, head_dim, head_dim), "float32")
        self.cache = b.cache(StateSpec((*conv_states, state)))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]."""
        cache, plan = batch.caches[self.cache], batch.plan(self.cache)
        shape = (x.shape[0], self.heads, self.size)
        q, k, v = (
            conv(part, cache[f"conv_{n}"], plan).float().view(shape)
            for n, conv, part in zip("qkv", self.convs, self.qkv(x).chunk(3, -1), strict=True)
        )
        q, k = _unit(q) * self.size**-0.5, _unit(k)
        fade, gate, beta = self._gates(x)
        decays = self._decays(fade.float() + self.dt_bias, shape)
        moved = beta[:, self.rank_heads].double().sigmoid().float()

        def move(state: Tensor, at: Tensor) -> Tensor:
            state.mul_(decays[at].unsqueeze(-1))
            key = k[at].unsqueeze(2)
            change = (v[at].unsqueeze(2) - key @ state) * moved[at][..., None, None]
            state += key.transpose(2, 3) @ change
            seen: Tensor = (q[at].unsqueeze(2) @ state).squeeze(2)
            return seen

        y = torch.empty_like(v)
        recur(cache["state"], plan, move, y)
        y = self.norm(y.to(x.dtype)) * gate.float().sigmoid().view(shape)
        mixed: Tensor = self.out(y.to(x.dtype).flatten(1))
        return mixed

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what decays, output gates and step sizes are computed from."""
        if self.full_rank:
            return self.fade(x), self.gate(x), self.narrow(x)
        fade, gate, beta = (part.contiguous() for part in self.narrow(x).split(self.parts, -1))
        return self.fade(fade), self.gate(gate), beta

    def _decays(self, fade: Tensor, shape: tuple[int, ...]) -> Tensor:
        """fade: [tokens, heads * head_dim] -> factors [tokens, heads, head_dim]."""
        rates = self.a_log.exp().unsqueeze(-1)
        if self.bound is None:
            return (-rates * F.softplus(fade).view(shape)).exp()
        return (self.bound * (rates * fade.view(shape)).sigmoid()).exp()


def _unit(x: Tensor) -> Tensor:
    """Normalize vectors to length 1."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
