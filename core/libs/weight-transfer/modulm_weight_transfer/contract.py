"""The contract of weight-transfer backends (group `modulm.weight_transfer`).

A backend brings weights from a trainer to the workers of an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from modulm.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from modulm.contracts.loader import StoredTensor

__all__ = ["API", "TensorSource", "WeightTransferBackend", "read_tensor_info"]

API = 1


class TensorSource(Protocol):
    """The tensors of one `update_weights`, by the checkpoint's names.

    They do not change before `close`, unless the backend `streams`.
    """

    def index(self) -> Mapping[str, StoredTensor]:
        """Describe the tensors by name, without reading them."""

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, in the order of the index."""

    def close(self) -> None:
        """Release the tensors."""


class WeightTransferBackend(ABC):
    """One instance per worker. All workers of an engine make the same calls with the same values.

    The driver's `Config` (attrs, frozen) holds the fields of `--weight-transfer-config` other than
    `backend`. Invalid data from a trainer raises RequestError; other failures raise EngineError.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    Config: ClassVar[type]
    #: Whether tensors can be read only once, as they arrive. Other updates are checked in full
    #: before the first weight changes.
    streams: ClassVar[bool] = False

    def __init__(self, config: Any, rank: int, ranks: int) -> None:
        """rank: of this worker, among all `ranks` of the engine and its replicas."""
        self.config, self.rank, self.ranks = config, rank, ranks

    @abstractmethod
    def connect(self, info: Mapping[str, Any]) -> None:
        """Connect to the trainer. info: the `init_info` of `init_weight_transfer_engine`."""

    @abstractmethod
    def open(self, info: Mapping[str, Any]) -> TensorSource:
        """Open the tensors of one update. info: the `update_info` of `update_weights`."""

    def checked(self, source: TensorSource) -> frozenset[str]:
        """Return the tensors of `source` that its sender has found to be finite.

        Only for senders that check all that they write: their values are not checked again.
        """
        return frozenset()

    def close(self) -> None:
        """Disconnect from the trainer; may be called twice."""


def read_tensor_info(info: Mapping[str, Any]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Read names, dtypes and shapes in vLLM's format: `names`, `dtype_names` and `shapes`, three
    lists of one length. Raises RequestError.
    """
    lists = [info.get(key) for key in ("names", "dtype_names", "shapes")]
    if not all(isinstance(each, list) and len(each) == len(lists[0] or ()) for each in lists):
        message = "names, dtype_names and shapes must be lists of one length"
        raise RequestError(message, "update_info")
    tensors: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for name, dtype, shape in zip(*(each or () for each in lists), strict=True):
        if not (isinstance(name, str) and isinstance(dtype, str)) or name in tensors:
            raise RequestError(f"{name!r} occurs twice or is not a valid name", "update_info")
        if not isinstance(shape, list | tuple) or not all(
            type(size) is int and 0 <= size < 1 << 40 for size in shape
        ):
            raise RequestError(f"{name}: shape must be a list of sizes", "update_info")
        tensors[name] = name, dtype.removeprefix("torch."), tuple(shape)
    return list(tensors.values())
