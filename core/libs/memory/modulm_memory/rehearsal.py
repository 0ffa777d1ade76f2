"""Rehearses a step without weights, to see what its activations allocate.

The model is built once more, with linear layers that return zeros. Everything else runs as it
would: norms, attention and recurrent layers, with the chosen ops and backends. Three short prompts
show how each allocation grows with the tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.nn import Module, Parameter

from modulm.contracts.media import MediaItem
from modulm.contracts.model import StateSpec
from modulm.contracts.quantization import LinearSpec, QuantizationMethod
from modulm.engine.kv_cache.sizing import allocate
from modulm.engine.worker.input_batch import BatchBuilder, GroupPlanner
from modulm.engine.worker.profiling import null_plan
from modulm.nn.builder import Builder
from modulm_memory.allocations import Allocations

if TYPE_CHECKING:
    from modulm.contracts.model import Batch
    from modulm.contracts.ops import Ops
    from modulm.contracts.platform import Platform
    from modulm.contracts.quantization import CheckpointInfo, ParamSpec
    from modulm.loading import CacheGroup
    from modulm.nn.builder import Shared

__all__ = ["Growth", "rehearse", "step_allocations"]

#: Tokens of the shortest prompt; the others have two and three times as many. One less than a
#: multiple of blocks of caches and, with recurrent layers, of their chunks, so that what these pad
#: is allocated.
_TOKENS, _TOKENS_OF_STATES = 31, 127
#: Smallest part of a size that is a square term; less is rounding.
_SQUARE = 0.002
#: Media of models whose encoder reads the prompt.
_TEXT = ("text",)


@frozen(eq=False)
class Growth:
    """Bytes that are alive at each moment of a step.

    terms: [moments, 3] float64: constant, per token, and per pair of tokens.
    """

    terms: np.ndarray

    def at(self, tokens: int, context: int | None = None) -> int:
        """Return the most bytes at once in a step of `tokens` tokens.

        context: tokens of a sequence so far, by default those of the step.
        """
        factors = np.array([1.0, tokens, float(tokens) * (context or tokens)])
        return round(float((self.terms @ factors).max(initial=0.0)))

    @classmethod
    def through(cls, tokens: int, sizes: Sequence[Sequence[int]]) -> Growth:
        """Fit the sizes at each moment of steps of `tokens`, twice and three times as many tokens.

        Steps of different moments are compared by their largest sizes.
        """
        if len({len(each) for each in sizes}) > 1:
            sizes = [[max(each)] for each in sizes]
        one, two, three = (np.array(each, dtype=np.float64) for each in sizes)
        square = (three - 2 * two + one) / 2
        square[np.abs(square) < _SQUARE * three] = 0
        slope = np.where(square == 0, (three - one) / 2, two - one - 3 * square)
        return cls(np.stack([one - slope - square, slope / tokens, square / tokens**2], -1))


class _NoWeights(QuantizationMethod):
    """The method of linear layers without weights, whose outputs are zeros."""

    name = "none"
    api = 1

    def __init__(self, ops: Ops, device: torch.device) -> None:
        self.ops, self._device = ops, device

    @classmethod
    def claims(cls, checkpoint: CheckpointInfo) -> str | None:
        return None

    @classmethod
    def rejects(cls, spec: LinearSpec, platform: Platform) -> str | None:
        return None

    def create(self, spec: LinearSpec) -> Mapping[str, ParamSpec]:
        return {}

    def finish(self, layer: Module, spec: LinearSpec) -> None:
        return None

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_zeros(*x.shape[:-1], _spec(layer).outputs)

    def experts(self, layer: Module) -> object:
        return _spec(layer)

    def embed(self, layer: Module, ids: Tensor) -> Tensor:
        return self._zeros(_spec(layer), len(ids))

    def dequantize(self, layer: Module, spec: LinearSpec) -> Tensor:
        return self._zeros(spec, spec.outputs)

    def _zeros(self, spec: LinearSpec, rows: int) -> Tensor:
        return torch.zeros(rows, spec.inputs, dtype=getattr(torch, spec.dtype), device=self._device)


def _spec(layer: Module) -> LinearSpec:
    return cast("LinearSpec", layer.spec)


def _mix(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: object, down: LinearSpec, **more: object
) -> Tensor:
    """The op `fused_experts` for layers without weights."""
    return x.new_zeros(len(x), down.outputs)


class _Substituted(SimpleNamespace):
    """An op table with some ops replaced."""

    def __init__(self, ops: Any, **others: Callable[..., Any]) -> None:
        super().__init__(**others)
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def find(self, name: str) -> Any:
        return vars(self).get(name) or self._ops.find(name)


@torch.inference_mode()
def rehearse(
    built: Any, groups: Sequence[CacheGroup], platform: Platform, *, masks: bool
) -> Growth:
    """Return how the memory of a step grows, from the steps of three prompts.

    built: the model as the loader builds it, without weights. masks: as in `build_model`. Raises
    what layers raise that do not run without weights.
    """
    model, shared = _build(built, masks=masks)
    states = any(isinstance(cache.spec, StateSpec) for cache in model.caches)
    tokens = max(min(_TOKENS_OF_STATES if states else _TOKENS, shared.max_length // 3), 1)
    for table in shared.ropes.values():
        table.fill(3 * tokens, shared.max_length, shared.device)
    caches = allocate(model.caches, groups, [2] * len(groups), platform)
    sizes = [step_allocations(model, groups, caches, platform, tokens * i) for i in (1, 2, 3)]
    return Growth.through(tokens, sizes)


@torch.inference_mode()
def step_allocations(
    model: Any,
    groups: Sequence[CacheGroup],
    caches: tuple[tuple[Any, ...], tuple[int, ...]],
    platform: Platform,
    tokens: int,
) -> list[int]:
    """Compute a prompt of `tokens` tokens; return the bytes of its tensors after each operation.

    caches: as `allocate` returns them. The prompt of a model with an encoder of texts is the
    encoder's; its decoder computes one token.
    """
    encodes = tuple(model.media) == _TEXT
    counts = np.array([1 if encodes else tokens], dtype=np.int32)
    plan = null_plan(counts, [group.block_size for group in groups])
    with Allocations() as allocations:
        builder = BatchBuilder(
            GroupPlanner.all(groups), *caches, rows=2, tokens=tokens, platform=platform
        )
        batch: Batch = builder.build(plan, counts.cumsum() - 1)
        if encodes:
            ids = {"input_ids": np.zeros(tokens, dtype=np.int64)}
            model.encode([MediaItem("text", b"", 0, tokens, ids, cross=True)])
        model.forward(batch)
    return list(allocations.live)


def _build(built: Any, *, masks: bool) -> tuple[Any, Shared]:
    """Build a model again, without weights."""
    shared: Shared = built.shared
    method = _NoWeights(cast("Ops", _Substituted(built.ops, fused_experts=_mix)), shared.device)
    shared = evolve(
        shared, units=[], elsewhere=[], caches=[], ropes={}, scales=set(), adapters=None,
        notified_adapters=None, masks=masks, ops=method.ops, plain=method,
        choose_method=lambda spec: method, choose_backend=built.choices.backends.__getitem__,
    )  # fmt: skip
    model = type(built.model)(built.settings, Builder(shared)).eval()
    for slot in (slot for unit in shared.units for slot in unit.slots):
        zeros = torch.zeros(slot.shape, dtype=slot.dtype, device=shared.device)
        setattr(slot.module, slot.attribute, Parameter(zeros, requires_grad=False))
    for unit in shared.units:
        tied = unit.waits_for is not None and unit.waits_for.module is not unit.module
        if unit.finish is not None and not tied:
            unit.finish()
    return model, shared
