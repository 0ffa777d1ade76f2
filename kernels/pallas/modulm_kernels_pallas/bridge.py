"""Between torch's tensors and JAX's arrays.

A tensor is torchax's, which holds an array (or, while a program is traced, a tracer), or one of
torch's in host memory, which is copied.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch

from modulm_kernels_pallas.torchax_import import torchax

j2t_dtype = torchax.ops.mappings.j2t_dtype
t2j_dtype = torchax.ops.mappings.t2j_dtype

__all__ = [
    "array_of", "assign", "is_array", "j2t_dtype", "numpy_of", "t2j_dtype", "tensor_of", "to_host",
]  # fmt: skip


def is_array(tensor: Any) -> bool:
    """Whether a tensor holds one of JAX's arrays."""
    return isinstance(tensor, torchax.tensor.Tensor | torchax.view.View)


def array_of(tensor: Any) -> jax.Array:
    """Return the array of a tensor; int64 becomes int32, fp64 becomes fp32."""
    if is_array(tensor):
        array: jax.Array = tensor.jax()
        return array
    return jax.numpy.asarray(numpy_of(tensor))


def tensor_of(array: jax.Array) -> torch.Tensor:
    """Wrap an array or tracer."""
    return torchax.tensor.Tensor(array, torchax.default_env())


def assign(tensor: Any, array: jax.Array) -> None:
    """Replace the contents of a tensor."""
    if isinstance(tensor, torchax.view.View):
        tensor.update(array)
    elif is_array(tensor):
        tensor._elem = array
    else:
        tensor.copy_(to_host(array).view(tensor.shape))


def numpy_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a host tensor as numpy array, with ml_dtypes for what numpy lacks."""
    plain = tensor.detach().contiguous()
    dtype = np.dtype(t2j_dtype(plain.dtype))
    if dtype.isbuiltin == 1:
        host: np.ndarray = plain.numpy()
        return host
    bits: np.ndarray = plain.view(_bits(plain.element_size())).numpy()
    return bits.view(dtype)


def to_host(array: jax.Array) -> torch.Tensor:
    """Wait for an array and copy it to a host tensor."""
    host = np.array(array)
    if host.dtype.isbuiltin == 1:
        return torch.from_numpy(host)
    wanted: torch.dtype = j2t_dtype(host.dtype)
    flat = host.view(f"i{host.dtype.itemsize}")
    return torch.from_numpy(flat).view(wanted)


def _bits(size: int) -> torch.dtype:
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
