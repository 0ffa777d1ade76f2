"""Prefix index: finds cached blocks of prompts with the same beginning.

A full block is named by a hash of its parent's name, its tokens and everything else that its
content depends on (cache salt, adapter, media items), so equal names mean equal keys and values.
Only full blocks have names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from modulm.contracts.requests import Request
from modulm.errors import ConfigError
from modulm.plugins.index import to_install

__all__ = ["ALGORITHMS", "Chain", "Hasher", "PrefixIndex", "block_extra", "hasher"]

#: (parent's name, tokens as int32 bytes, extra) -> the block's name.
Hasher = Callable[[bytes, bytes, bytes], bytes]


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data, usedforsecurity=False).digest()


def _builtin(data: bytes) -> bytes:
    """Python's keyed hash: fast, but only 64 bits and different in every process."""
    return hash(data).to_bytes(8, "little", signed=True)


def _xxhash() -> Callable[[bytes], bytes]:
    try:
        module: Any = import_module("xxhash")
    except ImportError as error:
        raise ConfigError(
            "prefix_caching_hash_algo", "xxhash is not installed, sha256 is" + to_install("xxhash")
        ) from error
    return lambda data: bytes(module.xxh3_128_digest(data))


def _raw(digest: Callable[[bytes], bytes]) -> Hasher:
    return lambda parent, tokens, extra: digest(parent + tokens + extra)


def _cbor_head(major: int, value: int) -> bytes:
    """Encode the head of a CBOR item in shortest form (RFC 8949, section 4.2.1)."""
    for code, width in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 24:
            return bytes([major << 5 | value])
        if value < 1 << (8 * width):
            return bytes([major << 5 | code]) + value.to_bytes(width, "big")
    raise OverflowError(value)


def _cbor(digest: Callable[[bytes], bytes]) -> Hasher:
    """Hash the canonical CBOR of [parent, [token, ...], extra], reproducible in any language."""

    def name(parent: bytes, tokens: bytes, extra: bytes) -> bytes:
        ids = np.frombuffer(tokens, dtype=np.int32).tolist()
        items = b"".join(_cbor_head(0, token) for token in ids)
        return digest(
            b"\x83" + _cbor_head(2, len(parent)) + parent
            + _cbor_head(4, len(ids)) + items
            + _cbor_head(2, len(extra)) + extra
        )  # fmt: skip

    return name


ALGORITHMS: dict[str, Callable[[], Hasher]] = {
    "builtin": lambda: _raw(_builtin),
    "sha256": lambda: _raw(_sha256),
    "sha256_cbor": lambda: _cbor(_sha256),
    "xxhash": lambda: _raw(_xxhash()),
    "xxhash_cbor": lambda: _cbor(_xxhash()),
}


def hasher(algorithm: str) -> Hasher:
    """Return the function that names blocks. Raises ConfigError for an unknown algorithm."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            "prefix_caching_hash_algo", f"{algorithm!r} is not one of {', '.join(ALGORITHMS)}"
        )
    return ALGORITHMS[algorithm]()


def _part(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(4, "little") + value


def block_extra(request: Request, start: int, end: int) -> bytes:
    """Return what the block of tokens [start, end) depends on besides its tokens.

    Salt and adapter are part of the first block that they affect; later blocks inherit them through
    their parent. Blocks before the adapter's first token do not depend on it.
    """
    extra = b""
    if start == 0 and request.salt is not None:
        extra += _part(b"s", request.salt.encode())
    if request.adapter is not None and start <= request.adapter_from < end:
        extra += _part(b"a", request.adapter.encode())
        if request.adapter_from > start:
            extra += _part(b"f", (request.adapter_from - start).to_bytes(8, "little"))
    for item in request.media:
        if item.start < end and item.start + item.length > start:
            extra += _part(b"m", (item.start - start).to_bytes(8, "little", signed=True))
            extra += _part(b"h", item.digest(start, end))
    return extra


class Chain:
    """The names of one request's full blocks. Grows with its tokens and survives preemption.

    root: identifies the model's weights once they have been updated; part of every name.
    """

    def __init__(self, request: Request, size: int, name: Hasher, root: bytes = b"") -> None:
        self.request = request
        self.size = size
        self.root = root
        self.names: list[bytes] = []
        self._name = name

    def extend(self, tokens: np.ndarray) -> None:
        """Name the new full blocks. tokens: int32, all tokens of the request."""
        size, names, request = self.size, self.names, self.request
        plain = not request.media and not request.adapter_from
        first = len(names) * size
        if len(tokens) - first < size:
            return
        data, width = tokens[first:].tobytes(), 4 * size
        parent = names[-1] if names else b""
        for at in range(0, len(data) - width + 1, width):
            start = first + at // 4
            extra = b"" if start and plain else block_extra(request, start, start + size)
            parent = self._name(self.root + parent, data[at : at + width], extra)
            names.append(parent)


class PrefixIndex:
    """Maps names to blocks of one pool. Of blocks with equal content the first one is kept.

    watchers: see `BlockGroup.watch`.
    """

    def __init__(self) -> None:
        self.watchers: list[Callable[[bytes, bool], None]] = []
        self._block: dict[bytes, int] = {}
        self._name: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block)

    def add(self, name: bytes, block: int) -> bool:
        """Add a block; False if another one has the same content."""
        if name in self._block:
            return False
        self._block[name] = block
        self._name[block] = name
        for watcher in self.watchers:
            watcher(name, True)
        return True

    def forget(self, block: int) -> None:
        """Remove a block that is about to be overwritten."""
        name = self._name.pop(block)
        del self._block[name]
        for watcher in self.watchers:
            watcher(name, False)

    def clear(self) -> None:
        """Forget everything."""
        self._block.clear()
        self._name.clear()

    def leading(self, names: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached run of leading names (full attention)."""
        blocks = []
        for name in names:
            block = self._block.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def trailing(self, names: Sequence[bytes], need: int) -> int:
        """Return the largest n such that the last `need` of the first n names are all cached.

        For sliding windows, where only blocks that the next token sees matter. For n < need all of
        the first n names must be cached.
        """
        run = 0
        for n in range(len(names), 0, -1):
            run = run + 1 if names[n - 1] in self._block else 0
            if run >= need:
                return n + run - 1
        return run

    def block(self, name: bytes) -> int:
        """Return the block with this name. Raises KeyError."""
        return self._block[name]
