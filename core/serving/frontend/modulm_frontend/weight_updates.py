"""Updates of the weights of an `LLM`, by vLLM's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from modulm.errors import RequestError
from modulm_weight_transfer.engine import EngineWeights

__all__ = ["WeightUpdates", "table_of"]


def table_of(request: Any, key: str) -> Mapping[str, Any]:
    """The table that a request of vLLM's has as `key`, or that is given itself. Raises
    RequestError.
    """
    value = getattr(request, key, request)
    if isinstance(value, Mapping) and set(value) == {key}:
        value = value[key]
    if not isinstance(value, Mapping):
        raise RequestError(f"{key} must be a table", key)
    return value


class WeightUpdates(ABC):
    """The methods of an `LLM` that update its weights, between calls of `generate`.

    Tensors have the checkpoint's names and shapes. Until `finish_weight_update` the old weights
    are used, unless the backend streams.
    """

    _weights: EngineWeights

    @abstractmethod
    def _check_open(self) -> None:
        """Raise EngineDead if the engine was shut down."""

    def _update(self, operation: str, **arguments: Any) -> dict[str, Any]:
        self._check_open()
        return self._weights.run(operation, arguments)

    def init_weight_transfer_engine(self, init_request: Any = None) -> None:
        """Have the workers meet the trainer, with the backend of `weight_transfer_config`.

        init_request: the backend's `init_info`, alone or under that name. Raises UnsupportedError
        without a backend.
        """
        self._update("init", init_info=table_of(init_request or {}, "init_info"))

    def start_weight_update(self, is_checkpoint_format: bool = True, partial: bool = False) -> None:
        """Begin an update; one that was not finished is dropped.

        partial: tensors that do not come stay as they are. Without it, all have to come.
        """
        self._update("start", is_checkpoint_format=is_checkpoint_format, partial=partial)

    def update_weights(self, request: Any) -> None:
        """Take tensors. request: the backend's `update_info`, alone or under that name.

        Raises RequestError naming tensors that are unknown, have another shape or values that are
        not finite; the weights are unchanged then.
        """
        self._update("update", update_info=table_of(request, "update_info"))

    def finish_weight_update(self) -> None:
        """Use the new weights. The weight version rises and cached prefixes are forgotten.

        Raises RequestError naming tensors that are missing; the old weights are used then.
        """
        self._update("finish")

    def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer."""
        self._update("shutdown")

    def get_weight_version(self) -> int:
        """How often the weights were updated, or what `update_weight_version` has set."""
        version: int = self._update("info")["weight_version"]
        return version

    def update_weight_version(self, weight_version: int) -> None:
        """Give the weights another number, such as the trainer's step."""
        self._update("set_version", weight_version=weight_version)
