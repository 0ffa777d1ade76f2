"""Measures what a rank holds once a model is loaded, and during steps, to compare estimates."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modulm.engine.kv_cache.sizing import allocate
from modulm.engine.parts import open_parts
from modulm.loading import load_model, resolve_checkpoint
from modulm_distributed.mesh import RankSpec, planned_mesh
from modulm_memory.held import HeldMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["PeakMemory", "measured"]


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the tensors that torch allocates within a `with` statement, in its thread.

    peak: the most bytes at once. Memory that kernels allocate themselves does not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, tuple[Any, int]] = {}
        self._older: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count its results, unless they are views of older tensors."""
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._live:
                self._older.add(storage._cdata)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._older:
                alive: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._live[storage._cdata] = (alive, storage.nbytes())
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()


def measured(
    config: EngineConfig, plugins: PluginManager, rank: int, blocks: Sequence[int]
) -> tuple[int, int]:
    """Load a rank's weights and allocate caches of `blocks`; return the bytes of both.

    Counts all tensors of the process that were not there before. The rank is loaded in this
    process, without connections to the others.
    """
    opened = resolve_checkpoint(config, plugins, "server")
    resolved, platform = opened.resolved.config, opened.platform
    spec = RankSpec.all_ranks(resolved.parallel, "")[rank]
    masks = any(part.masks for part in open_parts(resolved, plugins))
    before = _live()
    loaded = load_model(
        resolved, opened.checkpoint, platform, plugins, planned_mesh(spec), masks=masks
    )
    weights = _live().bytes - before.bytes
    held = HeldMemory()
    caches, _ = allocate(loaded.model.caches, loaded.groups, blocks, platform)
    for cache in caches:
        held.add(cache.values() if isinstance(cache, dict) else (cache,))
    return weights, held.bytes


def _live() -> HeldMemory:
    gc.collect()
    held = HeldMemory()
    kinds = ((each, type(each)) for each in gc.get_objects())
    # A compiler's fake tensors hold nothing.
    held.add(
        each
        for each, kind in kinds
        if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor)
    )
    return held
