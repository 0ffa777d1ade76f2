"""Platform: a kind of device (group `modulm.platforms`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from attrs import frozen

from modulm.errors import EngineError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    import torch

    from modulm.contracts.flags import FlagGroup

__all__ = [
    "API", "Binding", "Flags", "Memory", "Platform", "Probe", "Staging", "StepSizes", "Transfer",
]  # fmt: skip

API = 1


G = TypeVar("G", bound="FlagGroup")
Step = TypeVar("Step", bound="Callable[..., object]")
Layers = TypeVar("Layers")


class Flags(Protocol):
    """The configuration as platforms see it: flag groups, by class."""

    def group(self, cls: type[G]) -> G: ...


@frozen
class Probe:
    """How well a driver fits this machine. The highest score wins; 0: not usable."""

    score: int
    reason: str


@frozen
class Memory:
    """Device memory in bytes. free: available to new allocations."""

    total: int
    free: int


@frozen(kw_only=True)
class StepSizes:
    """Sizes that steps are padded to, ascending, for devices that support few shapes.

    rows, tokens: of the forward pass. samples: of logits and sampling. Block tables are as wide as
    the longest sequence needs.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    samples: tuple[int, ...]

    def padding(self, rows: int, tokens: int) -> list[int]:
        """Return the number of tokens of each padding row that follows a step's own rows.

        Each padding row has at least one token. Raises EngineError if no size fits.
        """
        for most in self.rows:
            for size in self.tokens:
                more, left = most - rows, size - tokens
                if more == left == 0 or 0 < more <= left:
                    return [1] * (more - 1) + [left - more + 1] * bool(more)
        raise EngineError(f"a step of {rows} rows and {tokens} tokens fits none of {self}")

    def sampled(self, count: int) -> int:
        """Return the padded number of samples for `count`. Raises EngineError if none fits."""
        for size in self.samples:
            if size >= count:
                return size
        raise EngineError(f"a step that samples {count} tokens fits none of {self}")


@frozen
class Binding:
    """Processors and NUMA nodes to bind a worker to.

    Without `cpus` it is bound to those of the nodes; with neither, the platform picks a node.
    """

    cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


class Staging:
    """Copies small arrays to the device; an implementation may combine those of a call.

    The default copies each. On devices that compute in host memory the tensors are views.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        """Return one tensor per array, in order, valid until the arrays are modified.

        On devices that queue work they are copies, valid for all work launched with them.
        """
        import torch

        return tuple(torch.from_numpy(array).to(self.device) for array in arrays)


class Transfer:
    """A copy of tensors to the host, started on construction. The default copies in `wait`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)

    def wait(self) -> tuple[np.ndarray, ...]:
        """Wait for the values and return them; may be called repeatedly."""
        return tuple(tensor.cpu().numpy() for tensor in self._tensors)


class Platform(ABC):
    """One kind of device, with everything that differs between devices.

    An instance represents one device of its process. Construction must not allocate device memory;
    `start` may.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    #: Attention backends, best first; a layer uses the first one that does not reject it.
    attention: ClassVar[tuple[str, ...]]
    #: Kernel providers (group `modulm.kernels`), best first; other ops run as their twins.
    kernels: ClassVar[tuple[str, ...]] = ()
    #: Collectives for tensors between ranks (group `modulm.collectives`), best first.
    collectives: ClassVar[tuple[str, ...]] = ("gloo",)
    #: Named capabilities that other code checks, e.g. "graphs", "pin_memory", "sleep".
    capabilities: ClassVar[frozenset[str]] = frozenset()
    #: Whether operations are queued and return before they are done; reading a result then waits
    #: for everything before it. Such platforms override `staging` and `fetch`.
    queued: ClassVar[bool] = False
    #: Flags without effect on this platform: field name -> the reason that is printed.
    no_effect: ClassVar[Mapping[str, str]] = {}
    #: Defaults of --max-num-batched-tokens and --max-num-seqs, for (offline, server).
    batched_tokens: ClassVar[tuple[int, int]] = (8192, 2048)
    sequences: ClassVar[tuple[int, int]] = (256, 256)
    #: Whether tokens are drafted by default (--speculative auto), because it was measured to pay.
    drafts: ClassVar[bool] = False
    #: Default of --block-size in tokens, unless the attention backend requires another.
    block_size: ClassVar[int] = 16

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Check whether this machine has the device. Must be fast, not raise, allocate nothing."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this process's tensors."""

    @abstractmethod
    def memory(self) -> Memory:
        """Return the total and free memory of the device."""

    def memory_per_worker(self, workers: int) -> Memory:
        """Return the memory that each of `workers` on this host would have."""
        return self.memory()

    @property
    @abstractmethod
    def dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes that models can run in ("bfloat16", ...), best first."""

    def choose_dtype(self, stored: str) -> str:
        """Choose the dtype for `--dtype auto`. stored: the checkpoint's dtype."""
        return stored if stored in self.dtypes else self.dtypes[0]

    def bind(self, binding: Binding) -> None:
        """Bind this thread, its child threads and their memory to part of the machine.

        Called before `start`, once per worker. Raises ConfigError for processors or nodes that
        this process may not use.
        """
        raise UnsupportedError(f"numa_bind: platform {self.name} cannot bind workers yet")

    def take_share(self, rank: int, ranks: int) -> None:
        """Select the device, or the share of a device, of worker `rank` of `ranks` on this host.

        Called before `bind` and `start`. Raises ConfigError if there are fewer devices.
        """
        raise UnsupportedError(f"platform {self.name} supports only one worker per host")

    def start(self, *, threads: int | None = None) -> None:
        """Prepare the process for running models (threads, streams). Called once per worker."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeroed memory for caches, which may be large and touched gradually."""
        import torch

        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def queue(self) -> AbstractContextManager[object]:
        """Return the context in which steps are launched (a stream, a device)."""
        return nullcontext()

    def staging(self) -> Staging:
        """Create a `Staging`; each call site that sends arrays has its own."""
        return Staging(self.device)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Start copying tensors to the host, after all work launched so far."""
        return Transfer(tensors)

    def recorded(self, forward: Step, config: Flags) -> Step:
        """Return `forward`, or a `RecordedForward` of it if the device replays steps."""
        return forward

    def attending(self, backend: Layers) -> Layers:
        """Return the `AttentionBackend` for layers, or a wrapper of it.

        A wrapper separates the pieces if steps are recorded piecewise.
        """
        return backend

    def reset_peak_memory(self) -> int | None:
        """Reset `peak_memory`. Returns the bytes in use by tensors, or None if not measured."""
        return None

    def peak_memory(self) -> int:
        """Return the maximum bytes in use by tensors since `reset_peak_memory`."""
        raise UnsupportedError(f"platform {self.name} does not measure memory")

    def step_sizes(self, rows: int, tokens: int) -> StepSizes | None:
        """Return sizes to pad steps to, up to `rows` and `tokens`; None: steps are not padded.

        Work for logprobs, penalties, grammars and logits processors, and inputs of step parts, are
        not padded.
        """
        return None

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""

    def empty_cache(self) -> None:
        """Free memory that the allocator holds but no tensor uses."""

    def describe(self) -> str:
        """Describe the device in one line: model, size, relevant instruction sets."""
        return self.name
