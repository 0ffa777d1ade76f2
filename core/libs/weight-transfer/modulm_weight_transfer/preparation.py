"""Loads layers of an update that are quantized or rearranged while steps go on.

Such layers are not overwritten by the checkpoint's tensors: they are loaded again (`BlankModel`),
which takes seconds for a large model. Done before `finish_weight_update`, only copying what was
loaded is left for the time in which steps stand still.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from modulm.contracts.loader import WeightLoader
from modulm.loading.weights import weight_bytes

if TYPE_CHECKING:
    from modulm.contracts.loader import StoredTensor
    from modulm.contracts.platform import Platform
    from modulm.loading.weights import WeightPlan
    from modulm_weight_transfer.blank import BlankModel

__all__ = ["Preparation"]

log = logging.getLogger("modulm.weights")

#: Part of the free memory that prepared layers may take.
_SHARE = 0.8


class _Stopped(Exception):
    """The update was discarded."""


class Preparation:
    """Loads the layers of a plan in a thread, or in the caller's if that waits for it."""

    def __init__(self, blank: BlankModel, plan: WeightPlan, loader: WeightLoader) -> None:
        self._blank, self._plan = blank, plan
        self._loader = _StoppableLoader(loader)
        self._running: Future[None] | None = None

    @classmethod
    def of(
        cls, blank: BlankModel, plan: WeightPlan, loader: WeightLoader, platform: Platform
    ) -> Preparation | None:
        """Return the preparation of a plan, if it has layers for it and there is enough memory.

        None on devices with queues: they load layers fast, and caches take their memory.
        """
        if platform.queued:
            return None
        rest = blank.unprepared(plan)
        if not rest.units:
            return None
        bits = blank.built.method.at_load_bits
        share = bits / torch.finfo(blank.built.shared.dtype).bits if bits else 1
        if weight_bytes(rest.units) * share > platform.memory().free * _SHARE:
            log.info("layers are quantized in finish_weight_update: there is no memory for copies")
            return None
        return cls(blank, rest, loader)

    def done(self, wait: bool) -> bool:
        """Return whether the layers are loaded; waits for it if `wait`."""
        if self._running is None:
            if wait:
                self._run()
                return True
            pool = ThreadPoolExecutor(1, thread_name_prefix="modulm-weights")
            self._running = pool.submit(self._run)
            pool.shutdown(wait=False)
        if not wait and not self._running.done():
            return False
        self._running.result()
        return True

    def _run(self) -> None:
        try:
            self._blank.prepare(self._plan, self._loader)
        except _Stopped:
            pass
        except Exception as error:  # `finish_weight_update` loads these layers and reports it
            log.debug("layers could not be prepared: %s", error)

    def stop(self) -> None:
        """Stop after the tensor that is being loaded."""
        self._loader.stopped = True
        if self._running is not None:
            self._running.result()


class _StoppableLoader(WeightLoader):
    """Reads the tensors of another loader until it is stopped."""

    name = "update"
    api = 1

    def __init__(self, loader: WeightLoader) -> None:
        self._loader, self.stopped = loader, False

    @classmethod
    def opens(cls, path: object) -> str | None:
        return None

    def index(self) -> Mapping[str, StoredTensor]:
        return self._loader.index()

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        for each in self._loader.read():
            if self.stopped:
                raise _Stopped
            yield each
