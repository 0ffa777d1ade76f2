"""The worker's half: passes transfers to the connector's mover and reports completed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from modulm.contracts.connector import KVMover, TransferPlan, TransferResult
from modulm.contracts.executor import Plan
from modulm.contracts.model import Batch
from modulm.contracts.step_part import PartRunner, RunnerContext
from modulm_kv_transfer.layers import LayeredMover
from modulm_kv_transfer.remote import LayeredPlan
from modulm_kv_transfer.units import BlockUnits

__all__ = ["LayeredTransferRunner", "TransferRunner"]

#: Maximum wait in seconds of a step without rows, since new requests are admitted between steps.
_PAUSE = 0.002
#: Tokens of a step with rows that generate and rests of fetched prompts. With AVX2 in bf16, layers
#: take 1.4 times as long for 8 tokens as for 4, and twice as long for 12.
_TOGETHER = 8


class TransferRunner(PartRunner):
    """Passes transfers to a mover and returns its reports.

    remote: whether requests may exchange blocks with other engines. queued: whether the device
    queues work, so that a step takes about as long with some tokens more.
    """

    def __init__(self, mover: KVMover, *, remote: bool = False, queued: bool = False) -> None:
        self._mover, self._remote, self._queued = mover, remote, queued

    def capacity(self) -> Mapping[str, Any]:
        if not self._remote:
            return {}
        return {"remote": 1, "together": 0 if self._queued else _TOGETHER}

    def open(self, context: RunnerContext) -> None:
        caches = BlockUnits(context.groups).arrange(context.caches)
        self._mover.open(caches, rank=context.rank, ranks=context.ranks)

    def close(self) -> None:
        self._mover.close()

    def begin(self, plan: Plan, value: TransferPlan | None) -> None:
        if value is not None:
            self._mover.begin(value)
            if not len(plan.rows):
                self._mover.wait(_PAUSE)

    def report(self) -> TransferResult | None:
        result = self._mover.ended()
        return result if result.done or result.failed or result.removed else None


class LayeredTransferRunner(TransferRunner):
    """Also tells a mover when the layers of a step are computed.

    A layer is a module with the index of its cache as `cache`. While a step fills blocks that are
    to be saved, such modules have a forward hook. Layers that others run without calling the module
    are saved after the step.
    """

    _mover: LayeredMover

    def __init__(self, mover: LayeredMover, *, queued: bool = False) -> None:
        super().__init__(mover, remote=True, queued=queued)
        #: Index of a cache -> its tensors in the mover's blocks.
        self._tensors: Mapping[int, Sequence[int]] = {}
        self._layers: Sequence[torch.nn.Module] = ()
        self._hooks: list[Any] = []
        #: The step whose layers will be watched.
        self._step: Plan | None = None

    def capacity(self) -> Mapping[str, Any]:
        return {**super().capacity(), "layers": 1}

    def open(self, context: RunnerContext) -> None:
        super().open(context)
        self._tensors = self._own_tensors(context.model_builder.caches)
        model = context.model
        if isinstance(model, torch.nn.Module):
            self._layers = [m for m in model.modules() if isinstance(_cache_of(m), int)]

    def _own_tensors(self, caches: Sequence[Any]) -> Mapping[int, Sequence[int]]:
        """Return the tensors that only one layer fills, by index of its cache."""
        addresses = [_addresses(cache) for cache in caches]
        users = Counter(address for each in addresses for address in each)
        places: dict[int, list[int]] = {}
        for index, (_, tensor) in enumerate(self._mover.copier.tensors):
            places.setdefault(tensor.data_ptr(), []).append(index)
        return {
            number: sorted(place for address in each for place in places.get(address, ()))
            for number, each in enumerate(addresses)
            if all(users[address] == 1 for address in each)
        }

    def begin(self, plan: Plan, value: TransferPlan | None) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        super().begin(plan, value)
        self._step = plan if isinstance(value, LayeredPlan) and value.computing else None

    def amend_batch(self, plan: Plan, batch: Batch) -> Batch:
        step, self._step = self._step, None
        # A step that runs in several passes is saved after it.
        if step is not None and len(plan.tokens) >= len(step.tokens):
            hook = partial(self._note, batch.query_starts)
            self._hooks = [layer.register_forward_hook(hook) for layer in self._layers]
        return batch

    def _note(self, starts: torch.Tensor, layer: torch.nn.Module, args: Any, _: Any) -> None:
        """Note that a layer has run. starts: of the step's batch, to tell it from others."""
        if any(isinstance(arg, Batch) and arg.query_starts is starts for arg in args):
            tensors = self._tensors.get(_cache_of(layer))
            if tensors:
                self._mover.computed(tensors)

    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        super().close()

    def report(self) -> TransferResult | None:
        # The planner learns from any report that the step has succeeded.
        result = self._mover.ended()
        news = result.done or result.failed or result.removed
        return result if news or self._mover.computing else None


def _cache_of(layer: torch.nn.Module) -> Any:
    return getattr(layer, "cache", None)


def _addresses(cache: Any) -> list[int]:
    tensors = cache.values() if isinstance(cache, Mapping) else (cache,)
    return [tensor.data_ptr() for tensor in tensors]
