"""Kernels on several devices: each computes its heads, and XLA splits everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

__all__ = ["AXIS", "current_mesh", "interpreted", "kernel_use", "over_heads", "using_mesh"]

#: Name of the mesh's axis.
AXIS = "tensor"
_meshes: list[Mesh | None] = [None]
_interpreted: list[bool] = [False]


def current_mesh() -> Mesh | None:
    """The mesh of the program that is being traced, None for a single device."""
    return _meshes[-1]


@contextmanager
def using_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Trace programs for these devices."""
    _meshes.append(mesh)
    try:
        yield
    finally:
        _meshes.pop()


def kernel_use() -> str | None:
    """How kernels that XLA cannot split run here: "compiled" on one TPU, None elsewhere, where
    operations of XLA replace them; "interpret" in tests.
    """
    if current_mesh() is not None:
        return None
    if _interpreted[-1]:
        return "interpret"
    return "compiled" if jax.default_backend() == "tpu" else None


@contextmanager
def interpreted() -> Iterator[None]:
    """Trace programs whose kernels are interpreted, on any device, slowly."""
    _interpreted.append(True)
    try:
        yield
    finally:
        _interpreted.pop()


def over_heads(function: Callable[..., Any], axes: Any, outputs: Any, *arguments: Any) -> Any:
    """Call a function on each device, with its part of the arguments.

    axes, outputs: for each argument and result, the dimension that is split, or None. XLA cannot
    split the calls of Pallas kernels by itself.
    """
    mesh = current_mesh()
    if mesh is None:
        return function(*arguments)

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)

    split = jax.shard_map(
        function, mesh=mesh, in_specs=tuple(map(spec, axes)), out_specs=tuple(map(spec, outputs)),
        check_vma=False,
    )  # fmt: skip
    return split(*arguments)
