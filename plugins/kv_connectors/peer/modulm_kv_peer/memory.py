"""Host memory that other processes of this user can read."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

__all__ = ["SharedMemory", "open_shared"]

#: Bytes behind the blocks that tell this memory from any other.
_TOKEN = 32


class SharedMemory:
    """Blocks in a file without a name: [blocks, width] uint8. Nothing is left when processes end.

    Raises OSError where the system has no such files.
    """

    def __init__(self, blocks: int, width: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("no memfd_create")
        self._file = os.memfd_create("modulm-kv", os.MFD_CLOEXEC)
        try:
            size = blocks * width
            os.ftruncate(self._file, size + _TOKEN)
            mapped = mmap.mmap(self._file, size + _TOKEN)
        except BaseException:
            os.close(self._file)
            raise
        self._token = secrets.token_bytes(_TOKEN)
        mapped[size:] = self._token
        self.blocks = torch.frombuffer(mapped, dtype=torch.uint8)[:size].view(blocks, width)

    def describe(self) -> Mapping[str, Any]:
        """Return what `open_shared` needs."""
        place = {"process": os.getpid(), "file": self._file}
        return {**place, "token": self._token, "slots": len(self.blocks)}

    def close(self) -> None:
        """Close the file. The memory is freed when nobody uses it any more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_shared(described: Mapping[str, Any], width: int) -> torch.Tensor | None:
    """Map another process's blocks: [slots, width] uint8; None if they cannot be reached.

    That is so on other machines, in other containers, and for other users.
    """
    process, number, slots = (described.get(key) for key in ("process", "file", "slots"))
    token = described.get("token")
    if not isinstance(token, bytes) or len(token) != _TOKEN:
        return None
    if not (isinstance(process, int) and isinstance(number, int) and isinstance(slots, int)):
        return None
    size = slots * width
    with suppress(OSError, ValueError):
        # The process may be another one in this container, and the file anything.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(f"/proc/{process}/fd/{number}", flags)
        try:
            if os.fstat(file).st_size != size + len(token):
                return None
            mapped = mmap.mmap(file, size + len(token))
        finally:
            os.close(file)
        if mapped[size:] == token:
            return torch.frombuffer(mapped, dtype=torch.uint8)[:size].view(slots, width)
    return None
