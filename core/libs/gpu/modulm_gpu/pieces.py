"""Piecewise recordings: attention runs normally between graphs of the surrounding layers.

Layers call attention through their backend, so the backend interrupts and resumes the recording.
Nothing is traced, and models need no annotations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.attention import PLAIN, AttentionBackend, AttentionInputs, QKVPrepare
from modulm.contracts.model import Batch
from modulm.contracts.recording import Recordable

if TYPE_CHECKING:
    from modulm.contracts.attention import AttentionPlan, KVLayout, StepLayout

__all__ = ["Breaks", "BrokenOff", "PlanPlaceholder", "TokensOnly"]


@frozen(eq=False)
class PlanPlaceholder:
    """Stands for a group's plan while pieces are recorded; each step has its own plan."""

    index: int


@frozen(eq=False)
class TokensOnly(Recordable):
    """A batch as seen between attention layers: one entry per token, no rows.

    Code that looks at rows while pieces are recorded gets tensors without memory, and placeholders
    instead of plans; then nothing is recorded.
    """

    batch: Batch

    def key(self) -> Hashable | None:
        """None for batches with embeddings or model-specific values."""
        batch = self.batch
        rare = (batch.embeds, batch.embeds_mask)
        if any(tensor is not None for tensor in rare) or batch.extras or batch.carried:
            return None
        return batch.axis_positions is not None, batch.adapters is not None

    def tensors(self) -> tuple[Tensor, ...]:
        batch = self.batch
        per_token = (batch.tokens, batch.positions, batch.axis_positions, batch.adapters)
        return tuple([tensor for tensor in per_token if tensor is not None])

    def over(self, tensors: Sequence[Tensor], tables: Sequence[Tensor] = ()) -> TokensOnly:
        tokens, positions, *others = tensors
        batch, left = self.batch, iter(others)
        moved = evolve(
            batch,
            tokens=tokens,
            positions=positions,
            axis_positions=None if batch.axis_positions is None else next(left),
            adapters=None if batch.adapters is None else next(left),
            query_starts=_without_memory(batch.query_starts),
            sample=_without_memory(batch.sample),
            plans=cast("Any", tuple(map(PlanPlaceholder, range(len(batch.plans))))),
        )
        return TokensOnly(moved)


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


class Breaks:
    """Where piecewise recordings are interrupted.

    between: handles attention calls (call, arguments) while pieces are recorded, otherwise None.
    """

    def __init__(self) -> None:
        self.between: Callable[[Callable[..., Any], tuple[Any, ...]], Any] | None = None
        self.backends: list[BrokenOff] = []

    @contextmanager
    def set(self, between: Callable[[Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[None]:
        """Route attention calls to `between` within the block."""
        self.between = between
        try:
            yield
        finally:
            self.between = None

    def around(self, backend: AttentionBackend) -> AttentionBackend:
        """Wrap a backend for use by layers."""
        self.backends.append(BrokenOff(backend, self))
        return self.backends[-1]


class BrokenOff(AttentionBackend):
    """A backend whose calls are not part of a piecewise recording."""

    def __init__(self, inner: AttentionBackend, breaks: Breaks) -> None:
        super().__init__(inner.spec, inner.platform, inner.ops, inner.block_size)
        self.inner, self._breaks = inner, breaks
        self.name = inner.name  # type: ignore[misc]
        # Whether the backend fused the call for this `prepare` object when it was last called.
        self._fuses: dict[int, tuple[QKVPrepare, bool]] = {}

    @classmethod
    def rejects(cls, spec: Any, platform: Any, ops: Any) -> str | None:
        return "wraps another backend"

    def layout(self, blocks: int) -> KVLayout:
        return self.inner.layout(blocks)

    def plan(self, step: StepLayout) -> AttentionPlan:
        return self.inner.plan(step)

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        self.inner.copy_blocks(cache, source, target)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        plan: Any,
        out: Tensor,
        inputs: AttentionInputs = PLAIN,
    ) -> None:
        if self._breaks.between is None:
            self.inner.forward(q, k, v, cache, plan, out, inputs)
            return
        self._breaks.between(self.inner.forward, (q, k, v, cache, plan, out, inputs))

    def forward_qkv(
        self,
        qkv: Tensor,
        positions: Tensor,
        prepare: QKVPrepare,
        cache: Tensor,
        plan: Any,
        out: Tensor,
        inputs: AttentionInputs = PLAIN,
    ) -> bool:
        arguments = (qkv, positions, prepare, cache, plan, out, inputs)
        if self._breaks.between is None:
            fused = self.inner.forward_qkv(*arguments)
            if id(prepare) not in self._fuses:
                self._fuses[id(prepare)] = prepare, fused
            return fused
        if not self._fuses.get(id(prepare), (prepare, True))[1]:
            return False
        return bool(self._breaks.between(self.inner.forward_qkv, arguments))
