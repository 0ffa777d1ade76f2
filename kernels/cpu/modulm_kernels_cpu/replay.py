"""Repeating a decode step as one C call, as CUDA graphs do for GPUs.

Between the kernels of a step lies Python that decides the same things every time. The first step
of each number of rows runs as usual while its C calls are written down, with the addresses they
were given; later steps of as many rows copy their input to the place where the first one's lay
and repeat the calls. The kernels and their arguments are the same, so the results are, bit for bit.

That is right only for a model that looks at the shapes of its input and at nothing in it, and
that computes by this package's kernels alone. Any torch operation that computes ends the
recording: this model then runs as usual for ever. Views are free, and new tensors get memory that
stays in place. Python that reads values through `Tensor.numpy()` would go unnoticed: no kernel's
wrapper may do that.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modulm.contracts.model import Batch
from modulm.ops.recording import FixedInputs, signature
from modulm_kernels_cpu.library import Library

__all__ = ["MAX_ROWS", "Replay"]

log = logging.getLogger("modulm.kernels.cpu")

#: Steps of more rows compute for so long that what lies between the kernels does not count.
MAX_ROWS = 64
#: Programs kept; each takes some 50 KB.
_MAX_PROGRAMS = 512
_ALIGNMENT = 64
_SMALLEST = 4096


class Unrepeatable(Exception):
    """The step does something that cannot be written down; the message says what."""


class Arena:
    """Memory for the tensors of recorded steps, in blocks whose sizes are powers of two.

    A block is free again when the last tensor on it is gone, and may then be another tensor's in
    the same step: repeated in the same order, the calls may share it as well. Programs share all
    blocks, since only one runs at a time.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._blocks: list[np.ndarray] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new tensor of this shape; its block comes back when nobody uses it any more."""
        used = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        size = max(_SMALLEST, 1 << max(used - 1, 0).bit_length())
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._new(size)
        held = block[:used]  # torch keeps this array for as long as the tensor's memory is used
        weakref.finalize(held, free.append, block).atexit = False
        return torch.from_numpy(held).view(dtype).view(tuple(shape))

    def _new(self, size: int) -> np.ndarray:
        raw = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        block = raw[start : start + size]
        self._blocks.append(block)
        return block

    def at(self, tensor: Tensor) -> Tensor:
        """The same place, without holding its block. Raises Unrepeatable if there is none."""
        address, used = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        if not tensor.is_contiguous():
            raise Unrepeatable("the result is not contiguous")
        for block in self._blocks:
            start = address - block.ctypes.data
            if start >= 0 and start + used <= len(block):
                return (
                    torch.from_numpy(block[start : start + used])
                    .view(tensor.dtype)
                    .view(tensor.shape)
                )
        raise Unrepeatable("the result is not made by a kernel")


class Recorder(TorchDispatchMode):
    """Writes down the C calls of one thread, and watches that torch computes nothing meanwhile.

    `reason` says what cannot be repeated; the step itself goes on undisturbed.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arena = arena
        self.slots: list[bytes] = []
        self.reason: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip it torch imports it, for a second or more of the first step."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket in _MAKERS and isinstance(result, Tensor):
            if result.device.type == "cpu" and result.is_contiguous():
                return self.arena.empty(result.shape, result.dtype)
        elif func._schema.is_mutable or not _is_view(result, args):
            self.reason = self.reason or f"torch computes {func}"
        return result

    def add(self, thunk: int | None, name: str, signature: str, arguments: tuple[Any, ...]) -> None:
        """See `library.Calls`."""
        if thunk is None:
            self.reason = self.reason or f"the kernel {name} cannot be repeated"
            return
        head = struct.pack("=Qq", thunk, len(signature))
        pairs = zip(signature, arguments, strict=True)
        self.slots.append(head + b"".join(_pack(letter, value) for letter, value in pairs))

    def program(self) -> np.ndarray:
        """[slots] uint64, as src/base/replay.cpp reads it. Raises Unrepeatable."""
        if self.reason is not None:
            raise Unrepeatable(self.reason)
        return np.frombuffer(b"".join(self.slots), dtype=np.uint64).copy()


_MAKERS = {torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like}


def _is_view(result: Any, args: Any) -> bool:
    """Whether the results of an operation lie in the memory of its first argument."""
    results = result if isinstance(result, list | tuple) else [result]
    if not args or not isinstance(args[0], Tensor):
        return False
    home = args[0].untyped_storage().data_ptr()
    return all(
        isinstance(part, Tensor) and part.untyped_storage().data_ptr() == home for part in results
    )


def _pack(letter: str, value: Any) -> bytes:
    if letter == "f":
        return struct.pack("=d", value)
    return struct.pack("=Q", value or 0) if letter == "p" else struct.pack("=q", value)


Result: TypeAlias = Tensor | tuple[Tensor, ...]


class _Program:
    """One recorded step: its inputs, the calls, and where their result lies."""

    def __init__(self, batch: Batch) -> None:
        self.inputs = FixedInputs(batch)
        self.slots = np.zeros(0, dtype=np.uint64)
        self.result: Result = torch.empty(0)


class Replay:
    """`forward`, recorded where that is possible. The result is overwritten by the next call.

    `reason` says why this model's steps are not recorded.
    """

    def __init__(self, library: Library, forward: Callable[[Batch], Result]) -> None:
        self._library = library
        self._forward = forward
        self._repeat = library.call("replay", "pn", ctypes.c_int64)
        self._arena = Arena()
        self._programs: dict[Hashable, _Program] = {}
        self.reason: str | None = None

    def __call__(self, batch: Batch) -> Result:
        if self.reason is not None or not _is_decode(batch):
            return self._forward(batch)
        key = signature(batch)
        if key is None:
            return self._forward(batch)
        program = self._programs.get(key)
        if program is None:
            return self._record(key, batch)
        program.inputs.put(batch)
        if self._repeat(program.slots.ctypes.data, len(program.slots)):
            return self._forward(batch)  # it raises what is wrong with the step
        return program.result

    def _record(self, key: Hashable, batch: Batch) -> Result:
        program, recorder = _Program(batch), Recorder(self._arena)
        with self._library.listen(recorder), recorder:
            result = self._forward(program.inputs.step)
        try:
            program.slots = recorder.program()
            several = isinstance(result, tuple)
            kept = tuple(map(self._arena.at, result if several else (result,)))
            program.result = kept if several else kept[0]
        except Unrepeatable as why:
            self._give_up(why)
            return result
        if len(self._programs) >= _MAX_PROGRAMS:
            self._programs.clear()
        self._programs[key] = program
        # torch has nothing left to compute in such a model that pays for more threads, and its
        # threads wait for their next work without sleep, on the cores that the kernels need.
        torch.set_num_threads(1)
        return result

    def _give_up(self, why: Unrepeatable) -> None:
        self.reason = str(why)
        self._programs.clear()
        log.debug("steps are not recorded: %s", why)


def _is_decode(batch: Batch) -> bool:
    """Whether every token's logits are wanted (one per row, or drafts that are verified), there
    are few enough, and no embeddings to put in place.
    """
    tokens = batch.tokens.shape[0]
    if tokens > MAX_ROWS or batch.embeds is not None:
        return False
    if tokens == batch.query_starts.shape[0] - 1:
        return True
    # Of several tokens in a row nothing but tensors may change, or each step would be recorded.
    return tokens == batch.sample.shape[0] and not any(plan.key() for plan in batch.plans)
