"""Prefix index: finds blocks of earlier requests that hold the same beginning.

A full block of tokens is named by a hash over its parent's name, its tokens and whatever else
its content depends on (a salt that keeps tenants apart, an adapter, the media whose placeholders
lie in it), so equal names mean equal keys and values. Only full blocks have names.
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

#: Names a block: (parent's name, its tokens as the bytes of int32, extra) -> its name.
Hasher = Callable[[bytes, bytes, bytes], bytes]


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data, usedforsecurity=False).digest()


def _builtin(data: bytes) -> bytes:
    """Python's own keyed hash: fast, but different in every process and only 64 bits."""
    return hash(data).to_bytes(8, "little", signed=True)


def _xxhash() -> Callable[[bytes], bytes]:
    try:
        module: Any = import_module("xxhash")
    except ImportError as error:
        raise ConfigError(
            "prefix_caching_hash_algo",
            "xxhash is not installed, sha256 is" + to_install("xxhash"),
        ) from error
    return lambda data: bytes(module.xxh3_128_digest(data))


def _raw(digest: Callable[[bytes], bytes]) -> Hasher:
    def name(parent: bytes, tokens: bytes, extra: bytes) -> bytes:
        return digest(parent + tokens + extra)

    return name


def _cbor_head(major: int, value: int) -> bytes:
    """The initial bytes of an item in CBOR's shortest form (RFC 8949, section 4.2.1)."""
    for code, width in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 24:
            return bytes([major << 5 | value])
        if value < 1 << (8 * width):
            return bytes([major << 5 | code]) + value.to_bytes(width, "big")
    raise OverflowError(value)


def _cbor(digest: Callable[[bytes], bytes]) -> Hasher:
    """Over the canonical CBOR of [parent, [token, ...], extra], which any language can write."""

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
    """The function that names blocks. Raises ConfigError for an unknown algorithm."""
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            "prefix_caching_hash_algo", f"{algorithm!r} is not one of {', '.join(ALGORITHMS)}"
        )
    return ALGORITHMS[algorithm]()


def _part(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(4, "little") + value


def block_extra(request: Request, start: int, end: int) -> bytes:
    """What the content of the block of tokens [start, end) depends on besides its tokens.

    Salt and adapter go into the first block that they concern: the chain carries them on. Blocks
    before the first token that uses the adapter are as without it.
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
    """The names of one request's full blocks; grows with its tokens, survives preemption.

    root: what the content of all blocks depends on: the weights, once they were updated.
    """

    def __init__(self, request: Request, size: int, name: Hasher, root: bytes = b"") -> None:
        self.request = request
        self.size = size
        self.root = root
        self.names: list[bytes] = []
        self._name = name

    def extend(self, tokens: np.ndarray) -> None:
        """tokens: int32, the request's tokens from its first one. Names the new full blocks."""
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
    """Name -> block of one pool. The first block with a content is the one that is found."""

    def __init__(self) -> None:
        self._block: dict[bytes, int] = {}
        self._name: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block)

    def add(self, name: bytes, block: int) -> bool:
        """Whether the block was added; False when another one already has the content."""
        if name in self._block:
            return False
        self._block[name] = block
        self._name[block] = name
        return True

    def forget(self, block: int) -> None:
        """The block is about to hold something else."""
        del self._block[self._name.pop(block)]

    def clear(self) -> None:
        """Forget everything."""
        self._block.clear()
        self._name.clear()

    def leading(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest run of names from the first one on (full attention)."""
        found = []
        for name in names:
            block = self._block.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def trailing(self, names: Sequence[bytes], need: int) -> int:
        """The largest n such that the last `need` of the first n names are all here.

        The rule of a sliding window: only the blocks that the next token can still see matter.
        n < need asks for all of the first n; 0 always holds.
        """
        run = 0
        for n in range(len(names), 0, -1):
            run = run + 1 if names[n - 1] in self._block else 0
            if run >= need:
                return n + run - 1
        return run

    def block(self, name: bytes) -> int:
        """The block that holds the content. Raises KeyError."""
        return self._block[name]
