"""The TPU platform. It computes with JAX, on TPUs or, if chosen explicitly, on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from attrs import field, frozen
from attrs.validators import ge

from modulm.config.environ import variables_for_library
from modulm.contracts.platform import Memory, Platform, Probe, StepSizes
from modulm.errors import ConfigError, EngineError
from modulm_platform_tpu.devices import chip_memory, chips_of, look
from modulm_platform_tpu.sizes import sizes_of

if TYPE_CHECKING:
    from modulm.contracts.platform import Flags, Step
    from modulm_platform_tpu.placement import Placement
    from modulm_platform_tpu.programs import CompiledForward

__all__ = ["Config", "TpuPlatform"]

#: Memory on processors, in bytes.
_ON_CPU = 1 << 30


@frozen
class Config:
    """Options (`--additional-config`).

    rows, tokens: sizes that steps are padded to; the largest ones are added. cache_dir: folder in
    which compiled programs are kept. coordinator: "HOST:PORT" of the first of several machines;
    hosts, host: their number and the index of this one.
    """

    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    cache_dir: str | None = None
    coordinator: str | None = None
    hosts: int = field(default=1, validator=ge(1))
    host: int = field(default=0, validator=ge(0))


class TpuPlatform(Platform):
    """The TPU chips of this process. Weights are loaded on the host and moved to the chips when the
    model is complete.
    """

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
        #: The first of the devices that are shared with other replicas, and their number.
        self._first, self._shared = 0, 1
        self._placement: Placement | None = None
        #: The part of the caches that one device holds; None before there is a model.
        self._cache_share: float | None = None
        self._compiled: WeakValueDictionary[tuple[int, tuple[int, ...]], CompiledForward] = (
            WeakValueDictionary()
        )

    @classmethod
    def probe(cls) -> Probe:
        return Probe(*look())

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> Memory:
        """Memory of a device, times as many as share each cache, once there is a model. It is the
        least of all machines, since all have equally many blocks. On processors it is small, since
        JAX touches all of a cache.
        """
        if self._placement is None and self._shared > 1:
            # JAX would take the chips of other replicas.
            return self.memory_per_worker(1)
        import jax

        statistics = jax.local_devices()[0].memory_stats()
        total = free = _ON_CPU
        if statistics and "bytes_limit" in statistics:
            total = statistics["bytes_limit"]
            free = total - statistics["bytes_in_use"]
        if jax.process_count() > 1:
            from jax.experimental.multihost_utils import process_allgather

            # In units of 64 KiB: arrays of JAX are of 32 bits.
            all_hosts = process_allgather(np.array([total >> 16, free >> 16], np.int32))
            total, free = (int(least) << 16 for least in all_hosts.min(axis=0))
        share = self._cache_share or 1.0
        return Memory(total=int(total / share), free=int(free / share))

    def memory_per_worker(self, workers: int) -> Memory:
        """Memory of a device by its kind: the process that asks is not always the worker, and JAX
        would take the chips.
        """
        if look()[0] == 1:
            return Memory(total=_ON_CPU, free=_ON_CPU)
        total = chip_memory()
        return Memory(total=total, free=total) if total else self.memory()

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("bfloat16", "float32")

    def start(self, *, threads: int | None = None) -> None:
        """Import JAX, and use the folder of compiled programs, if there is one."""
        import jax

        if threads is not None:
            torch.set_num_threads(threads)
        if self._config.coordinator is not None:
            self.join_hosts(self._config.coordinator, self._config.hosts, self._config.host)
        if self._config.cache_dir is not None:
            jax.config.update("jax_compilation_cache_dir", self._config.cache_dir)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def join_hosts(self, coordinator: str, hosts: int, host: int) -> None:
        """See `modulm_distributed.hosts.HostPlatform`. Later calls in a process do nothing."""
        import jax

        if jax.distributed.is_initialized():
            return
        if look()[0] == 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(coordinator, hosts, host)
        except RuntimeError as error:
            raise EngineError(f"{hosts} machines at {coordinator}: {error}") from error

    def take_share(self, rank: int, ranks: int) -> None:
        """Leave the devices before `rank`, and those after the model's own, to other replicas."""
        self._first, self._shared = rank, ranks

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        from modulm_kernels_pallas.bridge import t2j_dtype
        from modulm_platform_tpu.tensors import Cache

        return Cache(self._place().zeros(shape, t2j_dtype(dtype)))

    def _place(self, count: int = 1, whole_experts: bool = False) -> Placement:
        if self._placement is None:
            import jax

            from modulm_platform_tpu.placement import Placement

            first = self._first
            if self._shared > count and look()[0] > 1:
                # A process has chips of its own, which libtpu reads when it first looks for them.
                with variables_for_library(chips_of(first, count)):
                    jax.local_devices()
                first = 0
            self._placement = Placement.of(first, count, whole_experts)
        return self._placement

    def recorded(self, forward: Step, config: Flags) -> Step:
        from modulm.contracts.config.parallel import ParallelConfig
        from modulm.contracts.config.scheduler import SchedulerConfig
        from modulm_platform_tpu.programs import CompiledForward, model_of
        from modulm_platform_tpu.settings import settings_of

        flags, parallel = config.group(SchedulerConfig), config.group(ParallelConfig)
        if flags.max_num_seqs is None or flags.max_num_batched_tokens is None:
            raise ConfigError("max_num_seqs", "must be resolved first")
        sizes = self.step_sizes(flags.max_num_seqs, flags.max_num_batched_tokens)
        placement = self._place(parallel.tensor_parallel_size, parallel.enable_expert_parallel)
        layers = tuple(getattr(forward, "keywords", {}).get("layers", ()))
        model = model_of(forward)
        share = placement.cache_share(model.caches)
        self._cache_share = max(share, self._cache_share or share)
        key = id(model), layers
        compiled = self._compiled.get(key)
        if compiled is None:
            settings = settings_of(config, flags.max_num_seqs)
            compiled = CompiledForward(forward, sizes, placement, settings)
            self._compiled[key] = compiled
        return cast("Step", compiled)

    def step_sizes(self, rows: int, tokens: int) -> StepSizes:
        return sizes_of(rows, tokens, self._config.rows, self._config.tokens)

    def describe(self) -> str:
        if self.probe().score == 0:
            return "TPU, which this machine does not have"
        if self._placement is None and self._shared > 1:
            return "TPU, shared by replicas"
        import jax

        devices = jax.local_devices()
        kind = devices[0].device_kind
        return f"{kind} through JAX {jax.__version__}, {len(devices)} device(s)"
