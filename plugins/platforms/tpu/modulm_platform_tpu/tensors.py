"""Tensors that the engine holds between programs: their numbers are on the device.

The engine sees tensors of torch. Gathering hidden states, taking the argmax of logits and reading
caches happen in programs of JAX; other functions read the numbers on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import torch

from modulm.errors import UnsupportedError
from modulm_kernels_pallas.bridge import j2t_dtype, numpy_of, to_host

__all__ = ["Cache", "DeviceTensor", "Hidden", "Logits"]

_FACTS = frozenset(
    {
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.device.__get__,  # type: ignore[attr-defined]
        torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.is_floating_point,
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.element_size,
        torch.Tensor.__len__,
    }
)


class DeviceTensor(torch.Tensor):
    """A tensor whose numbers are in an array on the device, copied to the host when needed."""

    array: jax.Array
    rows: int

    @staticmethod
    def __new__(cls, array: jax.Array, rows: int | None = None) -> Self:
        """Wrap an array, or its first `rows` rows."""
        shape = array.shape if rows is None else (rows, *array.shape[1:])
        dtype: torch.dtype = j2t_dtype(array.dtype)
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")
        made.array, made.rows = array, shape[0] if shape else 0
        return made

    def host(self) -> torch.Tensor:
        """Wait for the numbers and return a copy in host memory."""
        return to_host(self.array)[: self.rows]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        special = cls.on_device(func, args)
        if special is not None:
            return special
        name = getattr(func, "__name__", "")
        if not cls.writable and (name == "__setitem__" or _in_place(name)):
            raise UnsupportedError(f"device tpu: {name} cannot change a tensor on the device")

        def host(value: Any) -> Any:
            if isinstance(value, DeviceTensor):
                return value.host()
            if isinstance(value, tuple | list):
                return type(value)(map(host, value))
            return value

        return func(*map(host, args), **{key: host(x) for key, x in (kwargs or {}).items()})

    #: Whether functions may change the copy on the host in place.
    writable = False

    @classmethod
    def on_device(cls, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Return the result of functions that run on the device, None for others."""
        return None

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise UnsupportedError(f"device tpu: {func} cannot read a tensor on the device")


class Hidden(DeviceTensor):
    """Hidden states [tokens, hidden]: rows are gathered on the device."""

    @classmethod
    def on_device(cls, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        if func is not torch.Tensor.__getitem__:
            return None
        own, key = args
        if isinstance(key, slice) and key.start in (None, 0) and key.step is None:
            return Hidden(own.array, len(range(*key.indices(own.rows))))
        if isinstance(key, torch.Tensor) and key.dim() == 1 and key.dtype == torch.int64:
            return Hidden(_gather(own.array, numpy_of(key)))
        return None


class Logits(DeviceTensor):
    """Logits [rows, vocabulary]. The first function that is not an argmax moves them to the host,
    where they may then be changed in place.
    """

    writable = True
    _moved: torch.Tensor | None = None

    @property
    def on_host(self) -> bool:
        """Whether the host's copy counts."""
        return self._moved is not None

    def host(self) -> torch.Tensor:
        if self._moved is None:
            self._moved = super().host()
        return self._moved

    def argmax_on_device(self) -> torch.Tensor:
        """Compute the op `argmax`; the result is on the host."""
        return torch.from_numpy(_argmax(self.array).__array__().astype("int64"))


class Cache(DeviceTensor):
    """A KV cache, which programs take and return. Its memory is used in place."""


@jax.jit
def _gather(hidden: jax.Array, rows: jax.Array) -> jax.Array:
    return hidden[rows]


@jax.jit
def _argmax(logits: jax.Array) -> jax.Array:
    best = jnp.argmax(logits, axis=-1)
    finite = jnp.isfinite(jnp.max(logits, axis=-1))
    return jnp.where(finite & ~jnp.isnan(logits).any(-1), best, -1)


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
