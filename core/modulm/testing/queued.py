"""A CPU platform that behaves like an asynchronous device with a queue.

Work that is launched inside `queue()` runs only when its result is waited for: operations return
tensors of garbage, which are filled later. Reading a value from the host in between raises
HostRead, and so does an operation whose output shape depends on values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from modulm.contracts.platform import Memory, Platform, Probe, Staging, Transfer
from modulm.errors import EngineError

__all__ = [
    "HostRead",
    "Queue",
    "QueuedPlatform",
    "holds_tensor",
    "listed",
    "nonsense",
    "on_meta",
    "output_shapes",
    "really",
    "undivided",
    "written",
]

_READS = frozenset(
    {"numpy", "tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}
)


class HostRead(EngineError):
    """The host read a value that the device has not computed yet."""


class Queue:
    """Work in order.

    unread: results that nobody has waited for; `ahead` counts launches while there were some.
    closed: why no work may be added or waited for now.
    """

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self._done = 0
        self.unread = self.ahead = 0
        self.closed = ""

    def put(self, work: Callable[[], object]) -> int:
        """Add work; return the position up to which the queue must run to complete it."""
        self._open()
        self._work.append(work)
        return self._done + len(self._work)

    @property
    def ordered(self) -> int:
        """The number of items ever added."""
        return self._done + len(self._work)

    def drain(self, until: int) -> None:
        """Run the work up to a position."""
        self._open()
        with really(), torch.inference_mode():
            while self._done < until:
                self._work.pop(0)()
                self._done += 1

    def _open(self) -> None:
        if self.closed:
            raise HostRead(self.closed)


@contextmanager
def really() -> Iterator[None]:
    """Run operations immediately, as on a real CPU."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def nonsense(like: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same shape filled with invalid values."""
    value = torch.nan if like.is_floating_point() else 1 if like.dtype == torch.bool else -77
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).fill_(value)


class _Later(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Queue operations on tensors; views and new tensors are created immediately."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._queue = queue

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the default imports torch's compiler, and wraps each operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in undivided:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            undivided.add(func)
        schema = func._schema
        views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        tensors = [each for each in (*args, *kwargs.values()) if holds_tensor(each)]
        if views or not tensors:
            return func(*args, **kwargs)
        if schema.is_mutable:
            self._queue.put(lambda: func(*args, **kwargs))
            return written(schema, args, kwargs)
        return self._filled_later(func, args, kwargs)

    def _filled_later(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            shapes = output_shapes(func, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise HostRead(f"{func}: its output shape depends on values: {error}"[:300]) from error
        outputs = tree_map_only(torch.Tensor, nonsense, shapes)

        def fill() -> None:
            results = func(*args, **kwargs)
            for target, value in zip(listed(outputs), listed(results), strict=True):
                target.copy_(value)

        self._queue.put(fill)
        return outputs


#: Operations that do not decompose into others.
undivided: set[Any] = set()
_shapes: dict[Any, Any] = {}


def output_shapes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an operation's outputs as tensors on the meta device, computed once per shapes."""
    key = (func, _signature(args), _signature(tuple(sorted(kwargs.items()))))
    if key not in _shapes:
        device = {"device": "meta"} if kwargs.get("device") is not None else {}
        _shapes[key] = func(*on_meta(args), **on_meta({**kwargs, **device}))
    return _shapes[key]


def _signature(value: Any) -> Any:
    """Return what decides the shapes of an operation's outputs, as a hashable value."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_signature, value))
    return type(value), value


def holds_tensor(value: Any) -> bool:
    several = isinstance(value, list | tuple)
    return any(map(holds_tensor, value)) if several else isinstance(value, torch.Tensor)


def on_meta(values: Any) -> Any:
    return tree_map_only(
        torch.Tensor,
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
        values,
    )


def listed(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that the operation writes to, as it returns them."""
    targets = [
        args[i] if i < len(args) else kwargs[argument.name]
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if not schema.returns:
        return None
    return targets[0] if len(schema.returns) == 1 else tuple(targets)


class _NoReads(TorchFunctionMode):
    """Raises HostRead for reads by the host. Arrays are copied when they become tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise HostRead(f"Tensor.{name} between the launch of a step and its result")
        if name == "from_numpy":
            args = (args[0].copy(),)
        return func(*args, **(kwargs or {}))


class _QueuedStaging(Staging):
    def __init__(self, queue: Queue) -> None:
        super().__init__(torch.device("cpu"))
        self._queue = queue

    def send(self, arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        with really():
            return tuple(self._send(torch.from_numpy(array.copy())) for array in arrays)

    def _send(self, source: torch.Tensor) -> torch.Tensor:
        target = nonsense(source)
        self._queue.put(lambda: target.copy_(source))
        return target


class _QueuedTransfer(Transfer):
    def __init__(self, queue: Queue, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__([nonsense(tensor) for tensor in tensors])
        self._queue, self._read = queue, False
        queue.unread += 1
        self._until = queue.put(
            lambda: [to.copy_(of) for to, of in zip(self._tensors, tensors, strict=True)]
        )

    def wait(self) -> tuple[np.ndarray, ...]:
        self._queue.drain(self._until)
        self._queue.unread -= not self._read
        self._read = True
        with really():
            return super().wait()


class QueuedPlatform(Platform):
    """Register it as platform "queued" and run with `device="queued"`."""

    name: ClassVar[str] = "queued"
    api: ClassVar[int | tuple[int, int]] = 1
    attention: ClassVar[tuple[str, ...]] = ("sdpa",)
    queued: ClassVar[bool] = True
    #: The queue of the most recently created platform.
    work: ClassVar[Queue] = Queue()

    def __init__(self) -> None:
        QueuedPlatform.work = self._work = Queue()

    @classmethod
    def probe(cls) -> Probe:
        return Probe(1, "the CPU behaves like a device with a queue")

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> Memory:
        return Memory(1 << 30, 1 << 30)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float32", "bfloat16")

    @contextmanager
    def queue(self) -> Iterator[None]:
        self._work.ahead += self._work.unread > 0
        with _NoReads(), _Later(self._work):
            yield

    def synchronize(self) -> None:
        self._work.drain(self._work.ordered)

    def staging(self) -> Staging:
        return _QueuedStaging(self._work)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        with really():
            return _QueuedTransfer(self._work, tensors)
