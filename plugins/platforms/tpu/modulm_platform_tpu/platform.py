"""The TPU platform. It computes with JAX, on TPUs or, if chosen explicitly, on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from attrs import frozen

from modulm.contracts.platform import Memory, Platform, Probe, StepSizes
from modulm.errors import ConfigError
from modulm_platform_tpu.devices import look
from modulm_platform_tpu.sizes import sizes_of

if TYPE_CHECKING:
    from modulm.contracts.kernels import Forward
    from modulm.contracts.platform import Flags, Step

__all__ = ["Config", "TpuPlatform"]

#: Memory on processors, in bytes.
_ON_CPU = 1 << 30


@frozen
class Config:
    """Options (`--additional-config`).

    rows, tokens: sizes that steps are padded to; the largest ones are added. cache_dir: folder in
    which compiled programs are kept.
    """

    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    cache_dir: str | None = None


class TpuPlatform(Platform):
    """One TPU chip. Weights are loaded on the host and moved to it when the model is complete."""

    name = "tpu"
    api = 1
    Config = Config
    attention = ("pallas",)
    kernels = ("pallas",)
    capabilities = frozenset({"jax"})
    batched_tokens = (2048, 1024)
    sequences = (128, 64)
    block_size = 32

    def __init__(self, config: Config | None = None) -> None:
        self._config = config or Config()

    @classmethod
    def probe(cls) -> Probe:
        return Probe(*look())

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> Memory:
        """Memory of the device. On processors it is small, since JAX touches all of a cache."""
        import jax

        statistics = jax.local_devices()[0].memory_stats()
        if statistics and "bytes_limit" in statistics:
            total, used = statistics["bytes_limit"], statistics["bytes_in_use"]
            return Memory(total=total, free=total - used)
        return Memory(total=_ON_CPU, free=_ON_CPU)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("bfloat16", "float32")

    def start(self, *, threads: int | None = None) -> None:
        """Import JAX, and use the folder of compiled programs, if there is one."""
        import jax

        if threads is not None:
            torch.set_num_threads(threads)
        if self._config.cache_dir is not None:
            jax.config.update("jax_compilation_cache_dir", self._config.cache_dir)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.local_devices()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        import jax.numpy as jnp

        from modulm_kernels_pallas.bridge import t2j_dtype
        from modulm_platform_tpu.tensors import Cache

        return Cache(jnp.zeros(tuple(shape), t2j_dtype(dtype)))

    def recorded(self, forward: Step, config: Flags) -> Step:
        from modulm.contracts.config.scheduler import SchedulerConfig
        from modulm_platform_tpu.programs import CompiledForward

        flags = config.group(SchedulerConfig)
        if flags.max_num_seqs is None or flags.max_num_batched_tokens is None:
            raise ConfigError("max_num_seqs", "must be resolved first")
        sizes = self.step_sizes(flags.max_num_seqs, flags.max_num_batched_tokens)
        return cast("Step", CompiledForward(cast("Forward", forward), sizes))

    def step_sizes(self, rows: int, tokens: int) -> StepSizes:
        return sizes_of(rows, tokens, self._config.rows, self._config.tokens)

    def describe(self) -> str:
        if self.probe().score == 0:
            return "TPU, which this machine does not have"
        import jax

        devices = jax.local_devices()
        kind = devices[0].device_kind
        return f"{kind} through JAX {jax.__version__}, {len(devices)} device(s)"
