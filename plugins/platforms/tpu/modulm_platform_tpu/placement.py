"""Where arrays are: on one device, or split over a mesh of JAX (tensor and expert parallelism).

One process drives all devices, and models are built for a single rank. Weights and caches are split
by the dimension that the layer's ranks would split, and XLA adds the collectives (Xu et al., arXiv
2105.04663).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.quantization import LinearKind
from modulm.errors import ConfigError
from modulm_kernels_pallas.spread import AXIS

if TYPE_CHECKING:
    from modulm.contracts.model import CacheSpec
    from modulm.contracts.quantization import LinearSpec

__all__ = ["Placement"]


class Placement:
    """Places arrays on `devices`. whole_experts: whole experts are placed on each device."""

    def __init__(self, devices: Sequence[Any], whole_experts: bool = False) -> None:
        self.devices, self._whole = tuple(devices), whole_experts
        self.mesh = Mesh(np.array(self.devices), (AXIS,)) if len(self.devices) > 1 else None

    @classmethod
    def of(cls, first: int, count: int, whole_experts: bool) -> Placement:
        """Use `count` devices of this machine, or all of them on several machines.

        Raises ConfigError if there are fewer.
        """
        alone = jax.process_count() == 1
        found = jax.local_devices()[first:] if alone else jax.devices()
        if len(found) < count:
            raise ConfigError(
                "tensor_parallel_size", f"{count} devices, and JAX has {len(found)} for them"
            )
        if not alone and len(found) != count:
            raise ConfigError(
                "tensor_parallel_size", f"must be {len(found)}, the devices of all machines"
            )
        return cls(found[:count], whole_experts)

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    def sharding(self, axis: int | None = None) -> Any:
        """The sharding of arrays that are split by `axis`; None: every device has all of it."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.devices[0])
        spec = () if axis is None else (*[None] * axis, AXIS)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def weight(self, array: jax.Array, spec: LinearSpec | None) -> jax.Array:
        """Place a weight, or another tensor of the linear layer `spec`."""
        axis = None if spec is None or self.mesh is None else self._axis(array.shape, spec)
        return self.put(array, axis)

    def put(self, array: Any, axis: int | None = None) -> jax.Array:
        """Place an array, split by `axis`; with several machines, each has all of `array`."""
        where = self.sharding(axis)
        if where.is_fully_addressable:
            return jax.device_put(array, where)
        host = np.asarray(array)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    def cache_sharding(self, shape: Sequence[int]) -> Any:
        """The sharding of a cache, whose second dimension are heads or channels."""
        return self.sharding(1 if self._splits(shape) else None)

    def _splits(self, shape: Sequence[int]) -> bool:
        return self.mesh is not None and len(shape) > 2 and shape[1] % self.size == 0

    def cache_share(self, caches: Sequence[CacheSpec]) -> float:
        """The largest part of a kind of caches that one device holds: attention's, or states."""
        whole: Counter[str] = Counter()
        own: Counter[str] = Counter()
        for cache in caches:
            for kind, shape, dtype in _arrays_of(cache):
                size = math.prod(shape) * jnp.dtype(dtype).itemsize
                whole[kind] += size
                own[kind] += size // self.size if self._splits(shape) else size
        return max((own[kind] / whole[kind] for kind in whole), default=1 / self.size)

    def zeros(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        """Allocate a cache."""
        where = self.cache_sharding(shape)
        if self.mesh is None:
            return jax.device_put(jnp.zeros(tuple(shape), dtype), where)
        made: jax.Array = jax.jit(lambda: jnp.zeros(tuple(shape), dtype), out_shardings=where)()
        return made

    def _axis(self, shape: Sequence[int], spec: LinearSpec) -> int | None:
        """The dimension of a layer's tensor to split, None if it has none that can be."""
        experts = spec.kind is LinearKind.EXPERT
        if experts and self._whole:
            axes = [0]
        else:
            first = int(experts and len(shape) > 2)
            by_inputs = spec.input_shard.size == spec.inputs and spec._input_shard is not None
            axes = [len(shape) - 1, first] if by_inputs else [first, len(shape) - 1]
        sizes = (spec.experts, spec.outputs, spec.inputs)
        for axis in axes:
            if len(shape) > 1 and shape[axis] in sizes and shape[axis] % self.size == 0:
                return axis
        return None


def _arrays_of(cache: CacheSpec) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield (kind, shape of one entry, dtype) of a layer's own caches."""
    spec = cache.spec
    if cache.shares is not None:
        return
    if isinstance(spec, AttentionSpec):
        width = spec.head_dim + (0 if spec.latent else spec.value_dim or spec.head_dim)
        yield "attention", (1, 1 if spec.latent else spec.kv_heads, 1, width), spec.kv_dtype
    else:
        for _, shape, dtype in spec.tensors:
            yield "state", (1, *shape), dtype
