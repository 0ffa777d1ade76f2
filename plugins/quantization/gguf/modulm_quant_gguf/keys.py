"""Typed access to the metadata of a model."""

from __future__ import annotations

import math
from typing import Any

from modulm.errors import CheckpointError
from modulm_quant_gguf.container import Model, TensorInfo

__all__ = ["Keys"]


class Keys:
    """Metadata of the architecture, by relative keys. Raises CheckpointError naming the file."""

    def __init__(self, model: Model) -> None:
        self.model = model
        name = model.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(f"{model.path}: general.architecture: must be a name")
        self.architecture = name

    def error(self, key: str, what: str) -> CheckpointError:
        """Return an error about a key."""
        return CheckpointError(f"{self.model.path}: {self.architecture}.{key}: {what}")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer. A list with one value for all layers counts as one value."""
        value = self._value(key, default)
        if type(value) is not int:
            raise self.error(key, f"must be an integer, not {value!r}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        value = self._value(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self.error(key, f"must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be a boolean, not {value!r}")
        return value

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return self._key(key) in self.model.metadata

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}")
        return value

    def _key(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _value(self, key: str, default: Any) -> Any:
        value = self.model.metadata.get(self._key(key), default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.error(key, "different values per layer are not supported yet")
            (value,) = set(value)
        if value is None:
            raise self.error(key, "is missing")
        return value

    # Derived values.

    @property
    def layers(self) -> int:
        return self.integer("block_count")

    def heads(self, key: str) -> int:
        """Return `head_count` or `head_count_kv`, which defaults to `head_count`."""
        usual = None if key == "head_count" else self.heads("head_count")
        count = self.integer(f"attention.{key}", usual)
        if count < 1:
            raise self.error(f"attention.{key}", f"must be positive, not {count}")
        return count

    @property
    def head_size(self) -> int:
        return self.integer(
            "attention.key_length", self.integer("embedding_length") // self.heads("head_count")
        )

    def tensor(self, name: str) -> TensorInfo:
        """Return a tensor info. Raises CheckpointError if the tensor is missing."""
        if name not in self.model.tensors:
            raise CheckpointError(f"{self.model.path}: the tensor {name} is missing")
        return self.model.tensors[name]

    def has_tensor(self, name: str) -> bool:
        """Whether a tensor exists; "{}" stands for the number of any layer."""
        tensors = self.model.tensors
        return any(name.format(i) in tensors for i in range(min(self.layers, len(tensors))))
