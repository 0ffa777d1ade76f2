"""Replay a decode step as one C call, as CUDA graphs do on GPUs.

Between the kernels of a step, Python makes the same decisions every time. The first step with a
given number of rows runs normally while its C calls and their arguments are recorded; later steps
with as many rows copy their inputs to the recorded addresses and repeat the calls. The kernels and
their arguments are the same, so the results are bit-identical.

This requires a model that uses the shapes of its inputs but not their values, and that computes
only with this package's kernels. A torch operation that computes ends the recording, and the model
is not recorded again. Views are allowed, and new tensors get memory at fixed addresses. Reading
values through `Tensor.numpy()` would not be detected, so no kernel wrapper may do it.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modulm.contracts.kernels import ForwardWithLogits
from modulm.contracts.model import Batch
from modulm.ops.recording import FixedInputs, shapes
from modulm_kernels_cpu.library import Library

__all__ = ["MAX_ROWS", "Replay"]

log = logging.getLogger("modulm.kernels.cpu")

#: Steps with more rows take so long that the time between kernels does not matter.
MAX_ROWS = 64
#: Maximum number of programs; each takes about 50 KB.
_MAX_PROGRAMS = 512
_ALIGNMENT = 64
_SMALLEST = 4096


class Unrepeatable(Exception):
    """The step does something that cannot be recorded; the message says what."""


class Arena:
    """Memory for the tensors of recorded steps, in blocks whose sizes are powers of two.

    A block is free when the last tensor on it is freed, and may be reused in the same step:
    replayed calls run in the same order, so they may share it, too. Programs share all blocks,
    since only one runs at a time.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._blocks: list[np.ndarray] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a new tensor of this shape; its block is reused when the tensor is freed."""
        used = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        size = max(_SMALLEST, 1 << max(used - 1, 0).bit_length())
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._new(size)
        memory = block[:used]  # torch keeps this array alive as long as the tensor's memory is used
        weakref.finalize(memory, free.append, block).atexit = False
        return torch.from_numpy(memory).view(dtype).view(tuple(shape))

    def _new(self, size: int) -> np.ndarray:
        raw = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        block = raw[start : start + size]
        self._blocks.append(block)
        return block

    def at(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the same address that does not keep its block. Raises Unrepeatable."""
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
        raise Unrepeatable("the result was not computed by a kernel")


class Recorder(TorchDispatchMode):
    """Records the C calls of one thread, and detects computation in torch.

    `reason` is why the step cannot be replayed; the step itself continues normally.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arena = arena
        self.slots: list[bytes] = []
        self.reason: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports dynamo, which takes a second or more in the first step."""
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
            self.reason = self.reason or f"the kernel {name} cannot be replayed"
            return
        head = struct.pack("=Qq", thunk, len(signature))
        pairs = zip(signature, arguments, strict=True)
        self.slots.append(head + b"".join(_pack(letter, value) for letter, value in pairs))

    def program(self) -> np.ndarray:
        """Return [slots] uint64, as src/base/replay.cpp reads it. Raises Unrepeatable."""
        if self.reason is not None:
            raise Unrepeatable(self.reason)
        return np.frombuffer(b"".join(self.slots), dtype=np.uint64).copy()


_MAKERS = {torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like}


def _is_view(result: Any, args: Any) -> bool:
    """Whether the results of an operation are views of its first argument."""
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


class _Inputs(FixedInputs[Batch]):
    """Fixed inputs that the library copies before it repeats the calls.

    copies: [inputs, 7] int64, as in src/base/replay.cpp.
    """

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        tensors = [(t, 0, 1, t.nbytes, 0) for t in self._tensors]
        tables = [(t, t.stride(0) * t.itemsize, len(t), 0, t[0].nbytes) for t in self._tables]
        self.copies = np.array(
            [[t.data_ptr(), stride, 0, 0, *sizes] for t, stride, *sizes in (*tensors, *tables)],
            dtype=np.int64,
        )
        self.address, self.count = self.copies.ctypes.data, len(self.copies)

    def refer(self, tensors: Sequence[Tensor], tables: Sequence[Tensor]) -> None:
        """Set the tensors and tables to copy, which must be contiguous and stay alive."""
        self.copies[:, 2] = [tensor.data_ptr() for tensor in (*tensors, *tables)]
        for copy, table in zip(self.copies[len(tensors) :], tables, strict=True):
            copy[3] = copy[5] = table.shape[1] * table.itemsize


class _Program:
    """One recorded step: its inputs, the calls, and the location of its result."""

    def __init__(self, batch: Batch) -> None:
        self.inputs = _Inputs(batch)
        self.slots = np.zeros(0, dtype=np.uint64)
        self.address = self.size = 0
        self.tensors: tuple[Tensor, ...] = ()
        self.result: Result = ()

    def extend(self, slots: np.ndarray, tensors: tuple[Tensor, ...]) -> None:
        """Append calls and their results."""
        self.slots = np.concatenate((self.slots, slots))
        self.address, self.size = self.slots.ctypes.data, len(self.slots)
        self.tensors += tensors
        self.result = self.tensors if len(self.tensors) > 1 else self.tensors[0]


class Replay(ForwardWithLogits):
    """`forward`, recorded if possible. The result is overwritten by the next call.

    `reason` is why this model's steps are not recorded, `logits_reason` why they end before the
    logits.
    """

    def __init__(self, library: Library, forward: Callable[[Batch], Result]) -> None:
        self._library = library
        self._forward = forward
        self._repeat = library.call("replay", "pnpn", ctypes.c_int64)
        self._arena = Arena()
        self._programs: dict[Hashable, _Program] = {}
        self._logits: Callable[[Tensor], Tensor] | None = None
        self.reason: str | None = None
        self.logits_reason: str | None = None

    def append_logits(self, logits: Callable[[Tensor], Tensor]) -> None:
        self._logits = logits

    def __call__(self, batch: Batch) -> Result:
        if self.reason is not None or not _is_decode(batch):
            return self._forward(batch)
        same = batch.key()
        if same is None:
            return self._forward(batch)
        tensors = [tensor.contiguous() for tensor in batch.tensors()]
        tables = [table.contiguous() for table in batch.tables()]
        key = same, *shapes(tensors, tables)
        program = self._programs.get(key)
        if program is None:
            return self._record(key, batch)
        inputs = program.inputs
        inputs.refer(tensors, tables)
        if self._repeat(program.address, program.size, inputs.address, inputs.count):
            return self._forward(batch)  # raises the error of the step
        return program.result

    def _record(self, key: Hashable, batch: Batch) -> Result:
        program = _Program(batch)
        step = program.inputs.step
        result, recorder = self._listen(partial(self._forward, step))
        tensors = result if isinstance(result, tuple) else (result,)
        try:
            program.extend(recorder.program(), tuple(map(self._arena.at, tensors)))
        except Unrepeatable as why:
            self._give_up(why)
            return result
        if self._logits and self.logits_reason is None and len(step.sample) == len(step.tokens):
            self._record_logits(program, self._logits, tensors[0])
        if len(self._programs) >= _MAX_PROGRAMS:
            self._programs.clear()
        self._programs[key] = program
        # Such a model leaves torch nothing to compute that is worth several threads, and torch's
        # threads would spin on the cores that the kernels need.
        torch.set_num_threads(1)
        return program.result

    def _record_logits(
        self, program: _Program, logits: Callable[[Tensor], Tensor], hidden: Tensor
    ) -> None:
        """Append the calls that compute the logits of `hidden`, which must still be alive."""
        result, recorder = self._listen(partial(logits, hidden))
        try:
            program.extend(recorder.program(), (self._arena.at(result),))
        except Unrepeatable as why:
            self.logits_reason = str(why)
            log.debug("steps are recorded without their logits: %s", why)

    def _listen(self, function: Callable[[], Any]) -> tuple[Any, Recorder]:
        """Return the function's result and a recorder of its calls."""
        recorder = Recorder(self._arena)
        with self._library.listen(recorder), recorder:
            return function(), recorder

    def _give_up(self, why: Unrepeatable) -> None:
        self.reason = str(why)
        self._programs.clear()
        log.debug("steps are not recorded: %s", why)


def _is_decode(batch: Batch) -> bool:
    """Whether all tokens need logits (one per row, or drafts to verify), the step is small enough,
    and it has no prompt embeddings.
    """
    tokens = batch.tokens.shape[0]
    if tokens > MAX_ROWS or batch.embeds is not None:
        return False
    if tokens == batch.query_starts.shape[0] - 1:
        return True
    # With several tokens per row only tensors may change, or each step would be recorded.
    return tokens == batch.sample.shape[0] and not any(plan.key() for plan in batch.plans)
