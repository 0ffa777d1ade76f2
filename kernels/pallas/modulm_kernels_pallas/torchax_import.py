"""Import torchax, which traces torch's operations as JAX's.

torchax 0.0.13 does not import with torch 2.13: two of its tables name overloads for named tensors,
which that torch has removed. While it is imported, another overload of the same operation takes
their place, so the tables have an entry twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch._ops import OpOverloadPacket

__all__ = ["torchax"]


@contextmanager
def _removed_overloads() -> Iterator[None]:
    """Let operations answer to overloads that they no longer have."""
    original: Callable[[OpOverloadPacket, str], Any] = OpOverloadPacket.__getattr__

    def answer(packet: OpOverloadPacket, name: str) -> Any:
        try:
            return original(packet, name)
        except AttributeError:
            if "name" not in name or name.startswith("__"):
                raise
            return original(packet, packet.overloads()[0])

    OpOverloadPacket.__getattr__ = answer  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverloadPacket.__getattr__ = original  # type: ignore[method-assign]


def _load() -> Any:
    with _removed_overloads():
        loaded = import_module("torchax")
        environment = loaded.default_env()

    def unbind(x: Any, dim: int = 0) -> tuple[Any, ...]:
        array = x.jax()
        parts = (array.take(index, dim) for index in range(array.shape[dim]))
        return tuple(loaded.tensor.Tensor(part, environment) for part in parts)

    # Operations that models use and torchax has no lowering of.
    environment.override_op_definition(torch.ops.aten.unbind.int, unbind)
    return loaded


torchax: Any = _load()
