"""Base class of GPU platforms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from modulm.contracts.platform import Flags, Memory, Platform, Probe, Staging, Transfer
from modulm.errors import ConfigError
from modulm_gpu.flags import CompilationConfig
from modulm_gpu.graphs import GraphRecorder, RuntimeGraphs
from modulm_gpu.pieces import Breaks
from modulm_gpu.runtime import Runtime, Stream
from modulm_gpu.shapes import RecordedShapes, compiler
from modulm_gpu.transfers import PinnedStaging, PinnedTransfer

if TYPE_CHECKING:
    from modulm.contracts.attention import AttentionBackend
    from modulm.contracts.kernels import Forward
    from modulm.contracts.platform import Layers, Step
    from modulm_weight_offload.contract import HostCopies

__all__ = ["GpuPlatform", "Streams"]


class Streams:
    """The streams of steps and of copies."""

    def __init__(self, runtime: Runtime) -> None:
        module = runtime.module
        self.work: Stream = module.Stream()
        self.copies: Stream = module.Stream()


class GpuPlatform(Platform):
    """The process's current GPU.

    A subclass declares its vendor (`vendor`, and `misses`: why it is unavailable) and the GPU's
    capabilities. Steps run on a separate stream, because the default stream cannot be captured.
    """

    api = 1
    kernels = ("triton",)
    collectives = ("nccl",)
    capabilities = frozenset({"pin_memory", "graphs", "sleep"})
    queued = True
    batched_tokens = (16384, 8192)
    sequences = (1024, 256)
    #: Access to torch's device functions; tests replace it.
    runtime: ClassVar[Runtime]
    #: The vendor of these GPUs.
    vendor: ClassVar[str]

    def __init__(self) -> None:
        self._breaks = Breaks()
        if self.runtime.count():
            self.capabilities = self.capabilities | self.chip_abilities()  # type: ignore[misc]

    @classmethod
    def misses(cls) -> str | None:
        """Why this build of torch does not support these GPUs; None if it may."""
        return None

    @classmethod
    def probe(cls) -> Probe:
        reason = cls.misses()
        if reason is not None:
            return Probe(0, reason)
        try:
            count = cls.runtime.count()
        except (RuntimeError, AssertionError) as error:
            return Probe(0, f"torch cannot reach a GPU: {error}")
        if not count:
            return Probe(0, f"torch sees no {cls.vendor} GPU")
        return Probe(100, f"torch sees {count} {cls.vendor} GPU{'s' * (count > 1)}")

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    def memory(self) -> Memory:
        free, total = self.runtime.memory()
        module, device = self.runtime.module, self.device
        cached = module.memory_reserved(device) - module.memory_allocated(device)
        return Memory(total=total, free=free + cached)

    @property
    def fp8(self) -> str | None:
        """The 8-bit dtype that the chip multiplies natively, None if there is none."""
        return None

    def take_share(self, rank: int, ranks: int) -> None:
        """Use one GPU per worker."""
        count = self.runtime.count()
        if ranks > count:
            message = f"{ranks} ranks on this host, which has {count} {self.vendor} GPU(s)"
            raise ConfigError("tensor_parallel_size", message)
        self.runtime.module.set_device(rank)

    def start(self, *, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.runtime.module.set_device(self.device)

    def chip_abilities(self) -> frozenset[str]:
        """Capabilities that only some chips of this kind have."""
        return frozenset({self.fp8} if self.fp8 else ())

    @cached_property
    def streams(self) -> Streams:
        """Created on first use, in the worker's process."""
        return Streams(self.runtime)

    def queue(self) -> AbstractContextManager[object]:
        return self._launching()

    @contextmanager
    def _launching(self) -> Iterator[None]:
        module, work = self.runtime.module, self.streams.work
        before = module.current_stream()
        if before != work:
            work.wait_stream(before)
        with module.stream(work):
            yield

    def staging(self) -> Staging:
        return PinnedStaging(self.runtime, self.device)

    def host_copies(self) -> HostCopies:
        """Create the copies of a model whose weights are partly in host memory."""
        from modulm_gpu.host_copies import StreamCopies

        return StreamCopies(self.runtime, self.device)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        return PinnedTransfer(self.runtime, tensors, self.streams.copies)

    def recorded(self, forward: Step, config: Flags) -> Step:
        shapes = RecordedShapes.of(config)
        if not shapes.sizes:
            return forward
        graphs, backend = RuntimeGraphs(self.runtime), compiler(config.group(CompilationConfig))
        step = cast("Forward", forward)
        return cast("Step", GraphRecorder(step, shapes, graphs, self._breaks, backend))

    def attending(self, backend: Layers) -> Layers:
        return cast("Layers", self._breaks.around(cast("AttentionBackend", backend)))

    def reset_peak_memory(self) -> int:
        self.runtime.module.reset_peak_memory_stats(self.device)
        return int(self.runtime.module.memory_allocated(self.device))

    def peak_memory(self) -> int:
        return int(self.runtime.module.max_memory_allocated(self.device))

    def synchronize(self) -> None:
        self.runtime.module.synchronize(self.device)

    def empty_cache(self) -> None:
        self.synchronize()
        self.runtime.module.empty_cache()

    def describe(self) -> str:
        properties = self.runtime.properties()
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
