"""Record calls of the CPU kernels' C functions while their own tests run, for a replay elsewhere.

    python record_calls.py FOLDER TEST...

The tests run on level `scalar`. For each call, FOLDER/index has a line per call, argument and
buffer, and FOLDER/memory what the buffers hold before and after it. Calls whose arguments hold
addresses are left out, as they mean nothing elsewhere.
"""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_right
from pathlib import Path
from typing import Any

import pytest
import torch

from modulm_kernels_cpu import library

#: Calls of one function, and bytes of one buffer, that are recorded at most.
CALLS, BYTES = 24, 1 << 20
#: Functions about the machine or its memory, not about numbers.
LEFT_OUT = ("threads", "set_threads", "highest_level", "level", "probe", "rank", "replay")
CODES = {torch.float32: "f", torch.bfloat16: "b", torch.float16: "h", torch.float64: "d"}


class Recorder:
    """Writes calls; knows the memory of every tensor whose address was asked for."""

    def __init__(self, folder: Path) -> None:
        self.index, self.memory = (folder / "index").open("w"), (folder / "memory").open("wb")
        self.kept: dict[int, Any] = {}
        self.starts: list[int] = []
        self.dtypes: dict[int, str] = {}
        self.counts: dict[str, int] = {}
        self.seen: set[tuple[Any, ...]] = set()

    def know(self, tensor: torch.Tensor, address: int) -> None:
        """Keep the memory that a tensor is part of."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start and start not in self.kept:
            self.kept[start] = storage
            self.starts = sorted(self.kept)
        if start:
            self.dtypes[start] = CODES.get(tensor.dtype, "i")

    def find(self, address: int) -> int | None:
        """Return where the known memory around an address starts."""
        at = bisect_right(self.starts, address) - 1
        if at < 0:
            return None
        start = self.starts[at]
        return start if address < start + self.kept[start].nbytes() else None

    def read(self, start: int) -> bytes:
        return ctypes.string_at(start, self.kept[start].nbytes())

    def holds_addresses(self, content: bytes) -> bool:
        """Whether a buffer has an aligned word that is the address of known memory."""
        if len(content) < 8:
            return False
        words = torch.frombuffer(bytearray(content[: len(content) // 8 * 8]), dtype=torch.int64)
        likely = words[(words > 1 << 32) & (words < 1 << 48)].tolist()
        return any(self.find(word) is not None for word in likely)

    def put(self, content: bytes) -> int:
        at = self.memory.tell()
        self.memory.write(content)
        return at

    def call(self, name: str, signature: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Call a function; record the call if it can be repeated and is unlike earlier ones."""
        lines, starts = [], []
        for letter, value in zip(signature, arguments, strict=True):
            if letter != "p":
                lines.append(f"{'f' if letter == 'f' else 'i'} {value!r}")
                continue
            if not value:
                lines.append("n 0")
                continue
            start = self.find(value)
            if start is None or self.kept[start].nbytes() > BYTES:
                return function(*arguments)
            if start not in starts:
                starts.append(start)
            lines.append(f"p {starts.index(start)} {value - start}")
        key = (name, *(line for line in lines if line[0] != "p"))
        wanted = self.counts.get(name, 0) < CALLS and key not in self.seen
        if not wanted:
            return function(*arguments)
        before = [self.read(start) for start in starts]
        if any(map(self.holds_addresses, before)):
            return function(*arguments)
        result = function(*arguments)
        self.seen.add(key)
        self.counts[name] = self.counts.get(name, 0) + 1
        known = "-" if result is None or not isinstance(result, int) else str(result)
        print("call", name, len(lines), len(starts), known, file=self.index)
        for line in lines:
            print(line, file=self.index)
        for start, old in zip(starts, before, strict=True):
            new = self.read(start)
            after = -1 if new == old else self.put(new)
            print("b", self.dtypes[start], len(old), self.put(old), after, file=self.index)
        return result


def main() -> int:
    """Run the tests that the command line names, on level scalar."""
    folder = Path(sys.argv[1])
    recorder = Recorder(folder)
    make, address = library.Library.call, torch.Tensor.data_ptr

    def data_ptr(tensor: torch.Tensor) -> int:
        at = address(tensor)
        recorder.know(tensor, at)
        return at

    def call(self: Any, name: str, signature: str, result: type | None = None) -> Any:
        function = make(self, name, signature, result)
        if name.startswith(LEFT_OUT) or self.level != "scalar":
            return function
        return lambda *arguments: recorder.call(name, signature, function, arguments)

    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign,assignment]
    library.Library.call = call  # type: ignore[method-assign]
    library.load("scalar").set_threads(2)
    status = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "-k", "scalar", *sys.argv[2:]])
    recorder.index.close()
    recorder.memory.close()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
