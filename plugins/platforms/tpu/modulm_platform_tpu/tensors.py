"""Tensors that the engine holds between programs: their numbers are on the device.

The engine sees tensors of torch. Gathering hidden states, taking the argmax of logits and reading
caches happen in programs of JAX; other functions read the numbers on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import torch

from modulm.errors import UnsupportedError
from modulm_kernels_pallas.bridge import j2t_dtype, numpy_of, to_host

__all__ = ["Cache", "DeviceTensor", "Hidden", "Logits"]

#: Dtypes of the numbers of `Logits.draw_on_device`, by position, other than fp32.
_NUMBERS = {1: "int32"}

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
    """Hidden states [tokens, hidden]: rows are gathered on the device, padded to one of `sizes`."""

    sizes: Sequence[int] = ()

    @classmethod
    def of(cls, array: jax.Array, sizes: Sequence[int], rows: int | None = None) -> Self:
        """Wrap an array, or its first `rows` rows."""
        made = cls(array, rows)
        made.sizes = sizes
        return made

    @classmethod
    def on_device(cls, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        if func is torch.Tensor.clone:
            return args[0]  # arrays never change
        if func is torch.nn.functional.pad:  # by rows that nothing reads, as in padded steps
            own, (*sides, more) = args[0], args[1]
            fits = not any(sides) and own.rows + more <= len(own.array)
            return cls.of(own.array, own.sizes, own.rows + more) if fits else None
        if func is not torch.Tensor.__getitem__:
            return None
        own, key = args
        if isinstance(key, slice) and key.start in (None, 0) and key.step is None:
            return cls.of(own.array, own.sizes, len(range(*key.indices(own.rows))))
        if isinstance(key, torch.Tensor) and key.dim() == 1 and key.dtype == torch.int64:
            count = len(key)
            size = next((size for size in own.sizes if size >= count), count)
            places = np.pad(numpy_of(key), (0, size - count))
            return cls.of(_gather(own.array, places), own.sizes, count)
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
        return self._tokens(_argmax(self.array))

    def draw_on_device(self, *numbers: torch.Tensor) -> torch.Tensor:
        """Compute the op `sample`, with sums in fp32; the result is on the host.

        numbers: the temperature, top-k, top-p, min-p and the random number of each row.
        """
        more = len(self.array) - self.rows
        arrays = (np.pad(numpy_of(x), (0, more)).astype(_NUMBERS.get(i, "float32"))
                  for i, x in enumerate(numbers))  # fmt: skip
        return self._tokens(_draw(self.array, *arrays))

    def compile_sampling(self) -> None:
        """Compile `draw_on_device` for this shape."""
        one = torch.ones(self.rows)
        self.draw_on_device(one, one, one, one, one)

    def _tokens(self, array: jax.Array) -> torch.Tensor:
        return torch.from_numpy(array.__array__().astype("int64"))[: self.rows]

    @classmethod
    def on_device(cls, func: Callable[..., Any], args: Sequence[Any]) -> Any:
        wide = func is torch.Tensor.float and args[0].array.dtype == jnp.float32
        return args[0] if wide else None


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


@jax.jit
def _draw(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array,
    min_p: jax.Array, uniform: jax.Array,
) -> jax.Array:  # fmt: skip
    chosen = _argmax(logits)
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    peak = scaled.max(-1, keepdims=True)
    scaled = jnp.where(scaled < peak + jnp.log(min_p)[:, None], -jnp.inf, scaled)

    def limited(scaled: jax.Array) -> jax.Array:
        """Apply top-k and top-p, which need the order."""
        ordered = -jnp.sort(-scaled, axis=-1)
        last = jnp.clip(top_k, 1, scaled.shape[-1]) - 1
        floor = jnp.take_along_axis(ordered, last[:, None], 1)
        floor = jnp.where((top_k > 0)[:, None], floor, -jnp.inf)
        ordered = jnp.where(ordered < floor, -jnp.inf, ordered)
        running = jnp.cumsum(jnp.exp(ordered - peak), axis=-1)
        reached = (running < top_p[:, None] * running[:, -1:]).sum(-1)
        last = jnp.minimum(reached, scaled.shape[-1] - 1)
        mass = jnp.take_along_axis(ordered, last[:, None], 1)
        floor = jnp.maximum(floor, jnp.where((top_p < 1)[:, None], mass, -jnp.inf))
        return jnp.where(scaled < floor, -jnp.inf, scaled)

    filters = ((top_k > 0) | (top_p < 1)).any()
    scaled = jax.lax.cond(filters, limited, lambda x: x, scaled)
    running = jnp.cumsum(jnp.exp(scaled - peak), axis=-1)
    drawn = (running <= uniform[:, None] * running[:, -1:]).sum(-1)
    drawn = jnp.minimum(drawn, logits.shape[-1] - 1)
    return jnp.where((temperature > 0) & (chosen >= 0), drawn, chosen)


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
