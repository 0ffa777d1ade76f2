"""modulm's attention in place of transformers'."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from torch.nn import Module

from modulm.contracts.attention import PLAIN, AttentionBackend, AttentionInputs, QKVPrepare
from modulm.contracts.kernels import Ops
from modulm.contracts.model import Batch
from modulm.errors import UnsupportedError
from modulm.nn import Linear
from modulm_transformers.attention import AttentionStep, Turn, check_arguments
from modulm_transformers.kept_scales import KeptScales
from modulm_transformers.layers import BridgedNorm
from modulm_transformers.recognized_attention import PlainAttention

__all__ = ["BridgedAttention"]


class BridgedAttention(Module):
    """One layer of queries, keys and values, whose rotation and attention the backend fuses.

    Attributes that it lacks are those of the library's module. qkv: [hidden] -> queries, keys and
    values of this rank, side by side.
    """

    def __init__(self, module: Module, plain: PlainAttention, qkv: Linear, ops: Ops) -> None:
        super().__init__()
        self.__dict__["module"] = module
        self.plain, self.ops = plain, ops
        self.qkv = qkv
        for name in (*plain.norms, plain.out):
            self._modules[name] = module._modules[name]
        queries, keys, _ = qkv.spec.parts
        self.heads, self.kv_heads = queries // plain.head_dim, keys // plain.head_dim
        self.fused: QKVPrepare | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["module"], name)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        modulm: Any = None,
        **more: Any,
    ) -> tuple[Tensor | None, ...]:
        """hidden_states: [1, tokens, hidden] -> ([1, tokens, hidden], None)."""
        if isinstance(modulm, AttentionStep):
            turn = None
            if self.plain.neox is not None:
                turn = modulm.turn(position_embeddings, halved=self.plain.halved)
            where = modulm.place(self)
            out = self.run(hidden_states[0], modulm.batch, turn, where, modulm.scales)[None]
        else:
            check_arguments(self, attention_mask, modulm, more)
            self._check_angles(position_embeddings, hidden_states.shape[1])
            q, k, v = self._blank(hidden_states)
            attended = modulm.attend(self, q, k, v, self.plain.request)
            out = self._child(self.plain.out)(attended.flatten(2))
        return (out, *[None] * (self.plain.returned - 1))

    def _check_angles(self, angles: Any, tokens: int) -> None:
        """Raise UnsupportedError if the model's angles are not those that were tried."""
        plain = self.plain
        if plain.neox is None:
            return
        for part in angles:
            one, other = part.chunk(2, -1) if plain.halved else (part[..., ::2], part[..., 1::2])
            if part.shape[:-1] != (1, tokens) or not torch.equal(one, other):
                raise UnsupportedError(f"{type(self.module).__name__}: angles of another form")

    def _blank(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Zeros in the shapes of queries, keys and values, [1, heads, tokens, size]."""
        size, tokens = self.plain.head_dim, x.shape[1]
        return (
            x.new_zeros(1, self.heads, tokens, size),
            x.new_zeros(1, self.kv_heads, tokens, size),
            x.new_zeros(1, self.kv_heads, tokens, self.plain.value_dim),
        )

    def run(
        self,
        x: Tensor,
        batch: Batch,
        turn: Turn | None,
        where: tuple[int, AttentionBackend],
        scales: KeptScales,
    ) -> Tensor:
        """x: [tokens, hidden] -> the same shape. turn: None where the layer does not rotate."""
        cache, backend = where
        qkv = self.qkv(x)
        plain = self.plain
        out = qkv.new_empty(len(x), self.heads, plain.value_dim)
        memory, plan = batch.caches[cache], batch.plan(cache)
        prepare = self.fused or self._bind(backend)
        positions = batch.positions
        if turn is not None:
            positions = turn.positions
            if prepare.cos_sin is not turn.cos_sin:
                prepare = self.fused = evolve(prepare, cos_sin=turn.cos_sin)
        if not (self.fusable and backend.forward_qkv(qkv, positions, prepare, memory, plan, out)):
            q, k, v = self._project(qkv, turn)
            inputs = PLAIN
            if backend.spec.scales:
                inputs = AttentionInputs(None, None, *scales.of(id(self), k, v))
            backend.forward(q, k, v, memory, plan, out, inputs)
        attended: Tensor = self._child(plain.out)(out.flatten(1))
        return attended

    def _bind(self, backend: AttentionBackend) -> QKVPrepare:
        """Decide whether the backend may do all at once, and how."""
        plain = self.plain
        prepare = QKVPrepare(neox=plain.neox is not False)
        norms = [self._child(name) for name in plain.norms]
        plain_sizes = plain.head_dim == plain.value_dim and not backend.spec.scales
        self.fusable = plain_sizes and not norms
        if (
            plain_sizes
            and plain.order == "heads"
            and all(isinstance(n, BridgedNorm) for n in norms)
        ):
            q, k = (norm.norm for norm in norms)
            self.fusable = (q.eps, q.offset) == (k.eps, k.offset)
            prepare = evolve(
                prepare, q_norm=q.weight, k_norm=k.weight, eps=q.eps, norm_offset=q.offset
            )
        self.fused = prepare
        return prepare

    def _project(self, qkv: Tensor, turn: Turn | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split, norm and rotate: [tokens, heads, size] each."""
        plain, tokens = self.plain, len(qkv)
        q, k, v = torch.split(qkv, list(self.qkv.spec.parts), dim=-1)
        if plain.order == "whole":
            q, k = self._normed(q, k)
        q, k = (part.reshape(tokens, -1, plain.head_dim) for part in (q, k))
        if plain.order == "heads":
            q, k = self._normed(q, k)
        if turn is not None:
            self.ops.rotary(q, k, turn.positions, turn.cos_sin, plain.neox is not False)
        if plain.order == "last":
            q, k = self._normed(q, k)
        return q, k, v.reshape(tokens, -1, plain.value_dim)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (self._child(name) for name in self.plain.norms)
        return first(q), second(k)

    def _child(self, name: str) -> Any:
        return self._modules[name]
