"""Decode context parallelism: ranks share the cached tokens of a sequence.

With fewer KV heads than ranks, or one latent for all heads, several ranks would cache the same
vectors. Instead each of `n` ranks caches every n-th run of `interleave_tokens` tokens, so a block
of the pool covers n times the tokens that one rank stores. Each rank attends to its tokens with the
heads of all `n` ranks, and the results are merged by their log-sum-exp (Milakov and Gimelshein,
arXiv 1805.02867), in the order of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import evolve, fields, frozen
from torch import Tensor

from modulm.contracts.attention import (
    PLAIN,
    AttentionBackend,
    AttentionInputs,
    AttentionPlan,
    AttentionSpec,
    KVLayout,
    StepLayout,
)
from modulm.errors import ConfigError, UnsupportedError
from modulm.parallel import Mesh

if TYPE_CHECKING:
    from collections.abc import Callable

    from modulm.parallel import ProcessGroup

__all__ = ["ContextAttention", "ContextMesh", "Runs"]

#: Attention features that work with shared tokens; sinks are added when parts are merged.
_CUT = {"value_dim", "softcap", "latent", "scales", "sinks"}
#: Features of layers whose caches are small; every rank holds them whole.
_WHOLE = {"window", "cross"}


@frozen
class Runs:
    """The tokens that a rank caches: runs of `length` consecutive tokens, in turns."""

    rank: int
    ranks: int
    length: int

    def before(self, ends: np.ndarray) -> np.ndarray:
        """Return how many of the first `ends` tokens this rank caches."""
        turn = self.length * self.ranks
        rest = np.clip(ends % turn - self.rank * self.length, 0, self.length)
        count: np.ndarray = ends // turn * self.length + rest
        return count

    def slots(self, slots: np.ndarray, block: int) -> np.ndarray:
        """Convert global slots to slots in this rank's blocks of `block` tokens; tokens of other
        ranks get a slot in the null block.
        """
        ids, inside = np.divmod(slots, block * self.ranks)
        runs, within = np.divmod(inside, self.length)
        local = ids * block + runs // self.ranks * self.length + within
        masked: np.ndarray = np.where(runs % self.ranks == self.rank, local, 0)
        return masked


class ContextAttention(AttentionBackend):
    """Wraps a backend that attends to this rank's tokens with the heads of all ranks."""

    def __init__(
        self, inner: AttentionBackend, spec: AttentionSpec, group: ProcessGroup, length: int
    ) -> None:
        if inner.block_size % length:
            raise ConfigError(
                "cp_kv_cache_interleave_size", f"does not divide blocks of {inner.block_size}"
            )
        size = inner.block_size * group.size
        super().__init__(spec, inner.platform, inner.ops, size)
        self.name = inner.name  # type: ignore[misc]
        self._inner, self._group = inner, group
        self._runs = Runs(group.rank, group.size, length)
        first = group.rank * spec.heads
        self._own_heads = slice(first, first + spec.heads)

    @classmethod
    def rejects(cls, spec: Any, platform: Any, ops: Any) -> str | None:
        return "wraps another backend"

    def layout(self, blocks: int) -> KVLayout:
        return self._inner.layout(blocks)

    def copy_blocks(self, cache: Tensor, source: Tensor, target: Tensor) -> None:
        self._inner.copy_blocks(cache, source, target)

    def plan(self, step: StepLayout) -> AttentionPlan:
        counts = np.diff(step.query_starts)
        after = np.repeat(step.query_starts[1:], counts) - np.arange(step.query_starts[-1])
        ends = np.repeat(step.context_lens, counts) - after + 1
        block = self._inner.block_size
        return self._inner.plan(
            evolve(
                step,
                block_size=block,
                context_lens=self._runs.before(step.context_lens).astype(np.int32),
                slots=self._runs.slots(step.slots, block),
                visible=self._runs.before(ends).astype(np.int32),
            )
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Tensor,
        plan: AttentionPlan,
        out: Tensor,
        inputs: AttentionInputs = PLAIN,
    ) -> None:
        tokens, heads = len(q), q.shape[1] * self._group.size
        every = self._group.all_gather(q.flatten(1)).view(tokens, heads, -1)
        part = out.new_empty(tokens, heads, out.shape[-1])
        lse = torch.empty(tokens, heads, device=q.device)
        own_inputs = evolve(inputs, sinks=None, lse=lse)
        self._inner.forward(every, k, v, cache, plan, part, own_inputs)
        packed = torch.cat([part.float(), lse[..., None]], -1).flatten(1)
        parts = self._group.all_gather(packed).view(tokens, -1, heads, out.shape[-1] + 1)
        out.copy_(_merge(parts[:, :, self._own_heads], inputs.sinks))


def _merge(parts: Tensor, sinks: Tensor | None) -> Tensor:
    """Merge outputs and their lse: [tokens, ranks, heads, D + 1] -> [tokens, heads, D]."""
    lse = parts[..., -1]
    whole = lse.logsumexp(1)
    if sinks is not None:
        whole = torch.logaddexp(whole, sinks.float())
    shares = (lse - whole[:, None]).exp()
    total = parts[:, 0, :, :-1] * shares[:, 0, :, None]
    for rank in range(1, parts.shape[1]):
        total = total + parts[:, rank, :, :-1] * shares[:, rank, :, None]
    return total


@frozen
class ContextMesh(Mesh):
    """A mesh whose `context` ranks share a sequence's cached tokens in runs of
    `interleave_tokens`.
    """

    interleave_tokens: int = 1

    @classmethod
    def of(cls, mesh: Mesh, context: ProcessGroup, interleave_tokens: int) -> ContextMesh:
        """Return a mesh of the same ranks that shares the cached tokens."""
        groups = {field.name: getattr(mesh, field.name) for field in fields(Mesh)}
        return cls(**{**groups, "context": context}, interleave_tokens=interleave_tokens)

    def cut_cache(self, spec: AttentionSpec, copies: int, what: str) -> AttentionSpec:
        if spec.features & _WHOLE:
            return spec
        others = sorted(spec.features - _CUT)
        if others:
            raise UnsupportedError(
                f"decode_context_parallel_size: {what}: attention with {', '.join(others)} "
                "cannot be split; only causal attention over the whole context can"
            )
        if copies % self.context.size:
            alike = f"{copies} ranks hold" if copies > 1 else "no two ranks hold"
            raise UnsupportedError(
                f"decode_context_parallel_size: {what}: {alike} the same keys, and "
                f"{self.context.size} ranks cannot split them: use a divisor of "
                "--tensor-parallel-size divided by the number of key heads (latent attention: a "
                "divisor of --tensor-parallel-size)"
            )
        return evolve(spec, partial=True)

    def attention(
        self, spec: AttentionSpec, choose: Callable[[AttentionSpec], AttentionBackend]
    ) -> AttentionBackend:
        if not spec.partial:
            return choose(spec)
        heads = spec.heads * self.context.size
        inner = choose(evolve(spec, heads=heads, sinks=False))
        return ContextAttention(inner, spec, self.context, self.interleave_tokens)
