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
    """What a platform is told of the configuration: its flags, by the classes of their groups."""

    def group(self, cls: type[G]) -> G: ...


@frozen
class Probe:
    """How well a driver fits this machine: the highest score wins, 0 means "not here"."""

    score: int
    reason: str


@frozen
class Memory:
    """Device memory in bytes. `free` counts what a new allocation could take now."""

    total: int
    free: int


@frozen(kw_only=True)
class StepSizes:
    """Sizes that all steps are padded to, each ascending, for devices that run few shapes.

    rows, tokens: of the forward pass. samples: tokens that logits are computed for, and that the
    sampler chooses. Block tables are as wide as the longest sequence needs.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    samples: tuple[int, ...]

    def padding(self, rows: int, tokens: int) -> list[int]:
        """The tokens of each row of padding behind a step's own. Raises EngineError if none fits:
        each row of padding has a token at least, and all tokens of padding belong to one.
        """
        for most in self.rows:
            for size in self.tokens:
                more, left = most - rows, size - tokens
                if more == left == 0 or 0 < more <= left:
                    return [1] * (more - 1) + [left - more + 1] * bool(more)
        raise EngineError(f"a step of {rows} rows and {tokens} tokens fits none of {self}")

    def sampled(self, count: int) -> int:
        """How many samples a step has that wants `count`. Raises EngineError."""
        for size in self.samples:
            if size >= count:
                return size
        raise EngineError(f"a step that samples {count} tokens fits none of {self}")


@frozen
class Binding:
    """A part of the machine: processors by number, and the nodes that memory comes from.

    Without `cpus` those of the nodes are meant; with neither, the platform picks one node.
    """

    cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


class Staging:
    """Brings small arrays to the device, those of one call in one copy where that is a gain.

    The default copies each; on a device that computes on host memory tensors are views.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        """One tensor per array, in order, valid until the arrays are changed; where work is queued
        they are copied, and the tensors are valid for all work launched with them.
        """
        import torch

        return tuple(torch.from_numpy(array).to(self.device) for array in arrays)


class Transfer:
    """Tensors on their way to the host, begun when it is made. The default waits when asked."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)

    def wait(self) -> tuple[np.ndarray, ...]:
        """The values, once the work that gives them is done; may be called again."""
        return tuple(tensor.cpu().numpy() for tensor in self._tensors)


class Platform(ABC):
    """One kind of device. Everything that differs between devices is asked of this object.

    An instance stands for one device of the process that made it. Making one must not allocate
    device memory; `start` may.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]

    #: Attention drivers, best first; the first one that does not reject the layer is taken.
    attention: ClassVar[tuple[str, ...]]
    #: Kernel providers (group `modulm.kernels`), best first; an op nobody has runs as its twin.
    kernels: ClassVar[tuple[str, ...]] = ()
    #: What ranks exchange tensors through (group `modulm.collectives`), best first.
    collectives: ClassVar[tuple[str, ...]] = ("gloo",)
    #: Named abilities that other code may ask for, e.g. "graphs", "pin_memory", "sleep".
    capabilities: ClassVar[frozenset[str]] = frozenset()
    #: Whether work is queued: an operation returns before it is done, and reading what it gives
    #: waits for everything before it. Such platforms override `staging` and `fetch`.
    queued: ClassVar[bool] = False
    #: Flags that mean nothing here: field name -> the reason that is printed when one is given.
    no_effect: ClassVar[Mapping[str, str]] = {}
    #: Default of --max-num-batched-tokens and --max-num-seqs, for (offline, server).
    batched_tokens: ClassVar[tuple[int, int]] = (8192, 2048)
    sequences: ClassVar[tuple[int, int]] = (256, 256)
    #: Default of --block-size in tokens, where the attention driver leaves a choice.
    block_size: ClassVar[int] = 16

    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Say whether this machine has the device. Cheap, never raises, allocates nothing."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that tensors of this process live on."""

    @abstractmethod
    def memory(self) -> Memory:
        """Total and free memory of the device now."""

    @property
    @abstractmethod
    def dtypes(self) -> tuple[str, ...]:
        """Names of the dtypes that models may run in ("bfloat16", ...), best first."""

    def choose_dtype(self, stored: str) -> str:
        """The dtype for `--dtype auto`, given the dtype that the checkpoint is stored in."""
        return stored if stored in self.dtypes else self.dtypes[0]

    def bind(self, binding: Binding) -> None:
        """Keep this thread, what it starts and what it allocates to a part of the machine.

        Called before `start`, once per worker. Raises ConfigError for processors or nodes that
        this process does not have.
        """
        raise UnsupportedError(f"numa_bind: platform {self.name} cannot bind its workers: not yet")

    def take_share(self, rank: int, ranks: int) -> None:
        """Be the worker `rank` of those of this host: from now on this object stands for its
        device, or for its part of what all of them have. Called before `bind` and `start`.

        Raises ConfigError if there are fewer devices.
        """
        raise UnsupportedError(f"platform {self.name} has one worker on a host: not yet")

    def start(self, *, threads: int | None = None) -> None:
        """Prepare the process for running models (threads, streams); called once per worker."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory for caches, which may be large and used little by little."""
        import torch

        return torch.zeros(tuple(shape), dtype=dtype, device=self.device)

    def queue(self) -> AbstractContextManager[object]:
        """What steps are launched in (a stream, a device)."""
        return nullcontext()

    def staging(self) -> Staging:
        """A way for arrays to the device; each place in the code that sends has its own."""
        return Staging(self.device)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Begin to bring tensors to the host, after all work launched so far."""
        return Transfer(tensors)

    def recorded(self, forward: Step, config: Flags) -> Step:
        """A model's `Forward`, or a `RecordedForward` of it where the device repeats steps."""
        return forward

    def attending(self, backend: Layers) -> Layers:
        """What layers get as their `AttentionBackend`: where steps are recorded in pieces, one that
        stands between the pieces.
        """
        return backend

    def reset_peak_memory(self) -> int | None:
        """Bytes that tensors take now; from here on `peak_memory` counts. None: nothing counts."""
        return None

    def peak_memory(self) -> int:
        """Bytes that tensors took at most since `reset_peak_memory`."""
        raise UnsupportedError(f"platform {self.name} does not count memory")

    def step_sizes(self, rows: int, tokens: int) -> StepSizes | None:
        """Sizes to pad steps to, of at most `rows` rows and `tokens` tokens; None: none is padded.

        What rows ask for beside a token (logprobs, penalties, grammars, logits processors), and
        what step parts are given, is not padded.
        """
        return None

    def synchronize(self) -> None:
        """Wait until the device has finished all work that was queued."""

    def empty_cache(self) -> None:
        """Return memory that the allocator keeps but no tensor uses."""

    def describe(self) -> str:
        """One line for people: model of the device, size, relevant instruction sets."""
        return self.name
