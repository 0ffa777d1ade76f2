"""Layers in host memory that are copied into a few buffers of the device before they run.

Layer k uses buffer k % buffers, at fixed addresses. A pass starts the first copies when its first
layer begins; whenever a layer has run, the next one's copy into its buffer starts. Nothing is left
over from one pass to the next, so that passes can be recorded as graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

if TYPE_CHECKING:
    from modulm_weight_offload.contract import HostCopies

__all__ = ["Ring"]


class Ring:
    """Buffers for the layers in host memory.

    sources: [bytes] uint8 of each layer, in the order in which layers run. buffers: on the device,
    each as large as the largest source.
    """

    def __init__(
        self, copies: HostCopies, sources: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> None:
        self._copies, self._sources, self._buffers = copies, sources, buffers
        #: By buffer: the layer that it has or will have, and its copy until that is waited for.
        self._content: list[int | None] = [None] * len(buffers)
        self._running: dict[int, object] = {}
        #: By buffer: the layer that `fetch` has put there.
        self._fetched: dict[int, int] = {}

    def buffer_of(self, layer: int) -> Tensor:
        """Return the buffer of a layer, as large as its source."""
        buffer = self._buffers[layer % len(self._buffers)]
        return buffer[: len(self._sources[layer])]

    def fetch(self, layer: int) -> None:
        """Copy a layer into its buffer, between two steps; what is changed there needs `store`."""
        number = layer % len(self._buffers)
        if self._fetched.get(number) != layer:
            self._store(number)
            self.buffer_of(layer).copy_(self._sources[layer])
            self._fetched[number] = layer

    def store(self) -> None:
        """Copy the fetched layers back."""
        for number in list(self._fetched):
            self._store(number)

    def _store(self, number: int) -> None:
        if (layer := self._fetched.pop(number, None)) is not None:
            self._sources[layer].copy_(self.buffer_of(layer))

    def attach(self, first: Module, layers: Sequence[Module]) -> None:
        """Let `layers` copy themselves; a pass begins when `first` runs."""
        for number, layer in enumerate(layers):
            _wrap(layer, before=_call(self._enter, number), after=_call(self._leave, number))
        _wrap(first, before=self.begin)

    def begin(self) -> None:
        """Start the first copies of a pass."""
        self._running.clear()
        self._content = [None] * len(self._buffers)
        for layer in range(len(self._buffers)):
            self._start(layer)

    def _enter(self, layer: int) -> None:
        """Let the layer's work wait for its weights."""
        if self._content[layer % len(self._buffers)] != layer:
            self._start(layer)  # the model runs its layers in another order
        copy = self._running.pop(layer, None)
        if copy is not None:
            self._copies.wait(copy)

    def _leave(self, layer: int) -> None:
        """Start the copy of the next layer that uses the buffer."""
        following = layer + len(self._buffers)
        if following < len(self._sources):
            self._start(following)

    def _start(self, layer: int) -> None:
        number = layer % len(self._buffers)
        self._content[number] = layer
        self._running[layer] = self._copies.start(self.buffer_of(layer), self._sources[layer])


def _call(method: Callable[[int], None], layer: int) -> Callable[[], None]:
    return lambda: method(layer)


def _wrap(
    layer: Module, before: Callable[[], None], after: Callable[[], None] | None = None
) -> None:
    """Call functions before and after the methods of a layer, which may call one another."""
    running: list[bool] = []

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if running:
                return run(*args, **kwargs)
            before()
            running.append(True)
            try:
                result = run(*args, **kwargs)
            finally:
                running.clear()
            if after is not None:
                after()
            return result

        return wrapped

    for name in _methods(type(layer)):
        setattr(layer, name, around(getattr(layer, name)))


def _methods(kind: type) -> set[str]:
    """Return the public methods of a layer's class: all through which a model may run it."""
    classes = kind.__mro__[: kind.__mro__.index(Module)]
    return {
        name
        for each in classes
        for name, value in vars(each).items()
        if isinstance(value, FunctionType) and not name.startswith("_")
    }
