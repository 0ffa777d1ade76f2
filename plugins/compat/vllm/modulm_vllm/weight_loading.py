"""`load_weights` of the model that an `LLM` runs: trainers in the same process write to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from modulm.contracts.loader import StoredTensor
from modulm.errors import UnsupportedError
from modulm_vllm.failures import as_vllm
from modulm_weight_transfer.contract import WeightTransferBackend
from modulm_weight_transfer.flags import WeightTransferFlags
from modulm_weight_transfer.receiver import WeightReceiver

if TYPE_CHECKING:
    from torch import Tensor

    from modulm.engine.worker.worker import Worker
    from modulm_frontend.llm import LLM

__all__ = ["LocalTensors", "LocalWeights"]


class LocalTensors(WeightTransferBackend):
    """Tensors of the worker's own process, under the key `tensors` of an update."""

    name = "local"
    api = 1
    #: A trainer changes or frees a tensor once it was passed, so it is written at once.
    streams = True

    def connect(self, info: Mapping[str, Any]) -> None:
        """Do nothing: the trainer is in this process."""

    def open(self, info: Mapping[str, Any]) -> _Tensors:
        return _Tensors(info["tensors"])


class _Tensors:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def index(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(
                name,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                "load_weights",
                prod(tensor.shape) * tensor.dtype.itemsize,
            )
            for name, tensor in self._tensors.items()
        }

    def read(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._tensors.items()

    def close(self) -> None:
        """Do nothing: the tensors are the trainer's."""


def _attach(worker: Worker) -> None:
    WeightReceiver.attach(worker, LocalTensors(None, worker.mesh.world.rank, 1))


class LocalWeights:
    """Writes tensors into the model of an `LLM`. Calls of `load_weights` form one update, which
    ends before the next request.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm, self._attached, self._updating = llm, False, False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace weights by the checkpoint's names, one after the other; returns the names.

        Weights that are not passed stay. Raises ValueError for a tensor that does not fit.
        """
        names = set()
        with as_vllm():
            for name, tensor in weights:
                if not self._is_updating:
                    self._start()
                self._llm.update_weights({"tensors": {name: tensor.detach()}})
                names.add(name)
        return names

    def finish(self) -> None:
        """End the update, if there is one: cached prefixes of the old weights are dropped."""
        if self._is_updating:
            self._llm.finish_weight_update()
        self._updating = False

    @property
    def _is_updating(self) -> bool:
        """Whether an update is open; one that fails half way ends."""
        return self._updating and self._llm._weights.state.updating

    def _start(self) -> None:
        if not self._attached:
            if self._llm.info.config.group(WeightTransferFlags).weight_transfer_config:
                raise UnsupportedError("load_weights: use update_weights with the chosen backend")
            self._llm.collective_rpc(_attach)
            self._attached = True
        self._llm.start_weight_update(partial=True)
        self._updating = True

    @property
    def executor(self) -> Any:
        """vLLM's way from `model_executor` to the model of this process's rank."""
        runner = SimpleNamespace(model=self)
        return SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
