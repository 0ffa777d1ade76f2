"""Weight updates of an `LLM`, with vLLM's method names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modulm.errors import RequestError
from modulm_weight_transfer import functions
from modulm_weight_transfer.engine import EngineWeights

__all__ = ["WeightUpdates", "joined_checksums", "table_of"]


def joined_checksums(answers: Sequence[list[Any]]) -> dict[str, str]:
    """Join the answers of `compute_checksums`. Raises UnsupportedError."""
    return {
        name: digest for answer in answers for name, digest in functions.value_of(answer).items()
    }


def table_of(request: Any, key: str) -> Mapping[str, Any]:
    """Return the table under `key` of one of vLLM's requests, or the request if it is that table.

    Raises RequestError.
    """
    value = getattr(request, key, request)
    if isinstance(value, Mapping) and set(value) == {key}:
        value = value[key]
    if not isinstance(value, Mapping):
        raise RequestError(f"{key} must be a table", key)
    return value


class WeightUpdates(ABC):
    """Methods of `LLM` that update its weights between calls of `generate`.

    Tensors have the checkpoint's names and shapes. The old weights stay in use until
    `finish_weight_update`, unless the backend streams.
    """

    _weights: EngineWeights

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function in every worker; see `LLM.collective_rpc`."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise EngineDead if the engine has been shut down."""

    def _update(self, operation: str, **arguments: Any) -> dict[str, Any]:
        self._check_open()
        return self._weights.run(operation, arguments)

    def init_weight_transfer_engine(self, init_request: Any = None) -> None:
        """Connect the workers to the trainer with the backend of `weight_transfer_config`.

        init_request: the backend's `init_info`, or a table with that key. Raises UnsupportedError
        without a backend.
        """
        self._update("init", init_info=table_of(init_request or {}, "init_info"))

    def start_weight_update(self, is_checkpoint_format: bool = True, partial: bool = False) -> None:
        """Begin an update; discards an unfinished one.

        partial: tensors that are not sent keep their values. Otherwise all tensors must be sent.
        """
        self._update("start", is_checkpoint_format=is_checkpoint_format, partial=partial)

    def update_weights(self, request: Any) -> None:
        """Receive tensors. request: the backend's `update_info`, or a table with that key.

        Raises RequestError naming tensors that are unknown or have a wrong shape or non-finite
        values; the weights are unchanged then.
        """
        self._update("update", update_info=table_of(request, "update_info"))

    def finish_weight_update(self) -> None:
        """Switch to the new weights, increment the weight version and clear the prefix cache.

        Raises RequestError naming missing tensors; the old weights stay in use then.
        """
        self._update("finish")

    def shutdown_weight_transfer_engine(self) -> None:
        """Disconnect from the trainer."""
        self._update("shutdown")

    def get_weight_version(self) -> int:
        """The number of updates so far, or the value set by `update_weight_version`."""
        version: int = self._update("info")["weight_version"]
        return version

    def update_weight_version(self, weight_version: int) -> None:
        """Set the weight version, for example to the trainer's step."""
        self._update("set_version", weight_version=weight_version)

    def compute_weight_checksums(self) -> dict[str, str]:
        """Compute the SHA-256 of each weight of each worker, as the worker holds it."""
        return joined_checksums(self.collective_rpc(functions.compute_checksums))

    def release_kv_cache_memory(self) -> None:
        """Free the memory of the KV cache of an engine that sleeps at level 0, until `wake_up`.

        Raises RequestError while requests run, UnsupportedError without enable_sleep_mode.
        """
        self._update("release_caches")
