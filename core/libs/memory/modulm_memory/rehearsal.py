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

#: The prompts have one token less than once, twice and three times as many: multiples of the sizes
#: that layers pad texts, blocks and, with recurrent layers, chunks to. All pad one token, so that
#: padding is allocated but does not look like growth.
_MULTIPLE, _MULTIPLE_OF_STATES = 32, 128
#: One more than the tokens of a prompt that checks what seems to grow with pairs of tokens, since
#: layers may compute longer prompts piece by piece; and the error that is exact enough.
_FAR, _EXACT = 1024, 1e-3
#: Media of models whose encoder reads the prompt.
_TEXT = ("text",)


@frozen(eq=False)
class Growth:
    """Bytes that are alive at each moment of a step.

    terms: [moments, 4] float64: constant, per token of the step, per token of the sequence so far,
    and per pair of both.
    """

    terms: np.ndarray

    def at(self, tokens: int, context: int | None = None) -> int:
        """Return the most bytes at once in a step of `tokens` tokens.

        context: tokens of a sequence so far, by default those of the step.
        """
        context = context or tokens
        factors = np.array([1.0, tokens, context, float(tokens) * context])
        return round(float((self.terms @ factors).max(initial=0.0)))

    @property
    def has_pairs(self) -> bool:
        """Whether anything grows with pairs of tokens."""
        return bool(self.terms[:, 3].any())

    @classmethod
    def through(
        cls,
        tokens: Sequence[int],
        sizes: Sequence[Sequence[int]],
        ahead: Sequence[Sequence[int]] = (),
        *,
        pairs: bool = True,
    ) -> Growth:
        """Fit the sizes at each moment of steps of three prompts.

        Args:
            tokens: of the prompts, equally far apart.
            sizes: of their steps. Steps of different moments are compared by their largest sizes.
            ahead: of steps of the first prompt's length, in sequences of the second and the third
                one's; otherwise nothing grows with the sequence alone.
            pairs: whether anything may grow with pairs of tokens.
        """
        if len({len(each) for each in (*sizes, *ahead)}) > 1:
            sizes, ahead = [[max(each)] for each in sizes], [[max(each)] for each in ahead]
        one, two, three = (np.array(each, dtype=np.float64) for each in sizes)
        first, second, third = tokens
        square = (three - 2 * two + one) / (2 * (second - first) ** 2) * pairs
        slope = (three - one) / (third - first) - square * (first + third)
        constant = one - slope * first - square * first**2
        if not ahead:
            return cls(np.stack([constant, slope, 0 * slope, square], -1))
        near, far = (np.array(each, dtype=np.float64) for each in ahead)
        context = (far - near) / (third - second) - square * first
        slope = slope - context
        # What continues a sequence may need more than what begins one.
        more = near - (constant + slope * first + context * second + square * first * second)
        return cls(np.stack([constant + more.clip(0), slope, context, square], -1))


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
        return _NoExperts(_spec(layer), self._device)

    def embed(self, layer: Module, ids: Tensor) -> Tensor:
        return _zeros(_spec(layer), len(ids), self._device)

    def dequantize(self, layer: Module, spec: LinearSpec) -> Tensor:
        return _zeros(spec, spec.outputs, self._device)


@frozen(eq=False)
class _NoExperts:
    """A stack of experts without weights. A model with an op of its own gets zeros by index."""

    spec: LinearSpec
    device: torch.device

    def __getitem__(self, expert: int) -> Tensor:
        """Return a weight [outputs, inputs], as packed stacks do."""
        return _zeros(self.spec, self.spec.outputs, self.device)


def _zeros(spec: LinearSpec, rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, spec.inputs, dtype=getattr(torch, spec.dtype), device=device)


def _spec(layer: Module) -> LinearSpec:
    return cast("LinearSpec", layer.spec)


def _mix(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: object, down: _NoExperts, **more: object
) -> Tensor:
    """The op `fused_experts` for layers without weights."""
    return x.new_zeros(len(x), down.spec.outputs)


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
    caches = allocate(model.caches, groups, [2] * len(groups), platform)
    for table in shared.ropes.values():
        table.fill(min(_FAR, shared.max_length), shared.max_length, shared.device)

    def step(tokens: int, context: int = 0) -> list[int]:
        return step_allocations(model, groups, caches, platform, tokens, context)

    states = any(isinstance(cache.spec, StateSpec) for cache in model.caches)
    tokens = _prompts(shared.max_length, _MULTIPLE_OF_STATES if states else _MULTIPLE)
    continues = bool(model.caches) and tuple(model.media) != _TEXT
    growth = _fitted(step, tokens, continues)[-1]
    far = (shared.max_length + 1) // (tokens[0] + 1) * (tokens[0] + 1) - 1
    far = min(far, _FAR - 1)
    if not growth.has_pairs or far <= tokens[-1]:
        return growth
    size = max(step(far))
    fits = [growth, *_fitted(step, _prompts(far, _FAR // 4), continues)]
    return min(fits, key=lambda fit: max(abs(fit.at(far) - size), _EXACT * size))


def _fitted(
    step: Callable[..., list[int]], tokens: Sequence[int], continues: bool
) -> tuple[Growth, Growth]:
    """Fit steps of three prompts: without what grows with pairs of tokens, and with it.

    continues: whether steps may continue sequences.
    """
    sizes = [step(count) for count in tokens]
    ahead = [step(tokens[0], context) for context in tokens[1:] if continues]
    return Growth.through(tokens, sizes, ahead, pairs=False), Growth.through(tokens, sizes, ahead)


def _prompts(longest: int, multiple: int) -> list[int]:
    """Return the tokens of three prompts of at most `longest` tokens, one less than multiples."""
    while multiple > 2 and 3 * multiple - 1 > longest:
        multiple //= 2
    return [multiple * count - 1 for count in (1, 2, 3)]


@torch.inference_mode()
def step_allocations(
    model: Any,
    groups: Sequence[CacheGroup],
    caches: tuple[tuple[Any, ...], tuple[int, ...]],
    platform: Platform,
    tokens: int,
    context: int = 0,
) -> list[int]:
    """Compute a prompt of `tokens` tokens; return the bytes of its tensors after each operation.

    caches: as `allocate` returns them. context: tokens of the sequence with these, which are its
    last ones. The prompt of a model with an encoder of texts is the encoder's; its decoder computes
    one token.
    """
    encodes = tuple(model.media) == _TEXT
    counts = np.array([1 if encodes else tokens], dtype=np.int32)
    plan = null_plan(counts, [group.block_size for group in groups], context)
    if context:
        plan = evolve(plan, starts=context - counts)
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
