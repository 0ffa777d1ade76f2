"""Arithmetic of the fake model: a token is a hash of everything that its cache groups can see."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from modulm.contracts.media import DIGEST, MediaItem

__all__ = ["digest_of", "encoded_tokens", "mix", "token_of"]

_PRIME = np.uint64(0x9E3779B97F4A7C15)


def _powers(count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.cumprod(np.full(count, _PRIME, dtype=np.uint64))


def mix(value: int) -> int:
    """The finaliser of splitmix64: every input bit affects every output bit."""
    mask = (1 << 64) - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def digest_of(parts: Sequence[tuple[int, np.ndarray]], seed: int | None) -> int:
    """Hash what each group can see: (first position, tokens from there on) per group."""
    total = 0
    for first, tokens in parts:
        powers = _powers(first + len(tokens))[first:]
        with np.errstate(over="ignore"):
            summed = int(((tokens.astype(np.uint64) + np.uint64(1)) * powers).sum(dtype=np.uint64))
        total = mix(total ^ summed)
    return total if seed is None else mix(total ^ mix(seed & ((1 << 64) - 1)))


def token_of(digest: int, vocabulary: int, reserved: int) -> int:
    """Return the token for a digest; never below `reserved`."""
    return reserved + digest % (vocabulary - reserved)


def encoded_tokens(item: MediaItem) -> list[int]:
    """Return the fake cache entries for the tokens of an item."""
    if not item.encoded:
        parts = (item.hash[at : at + DIGEST] for at in range(0, len(item.hash), DIGEST))
        return [600 + mix(int.from_bytes(part, "little")) % 1000 for part in parts]
    seed = int.from_bytes(item.hash, "little")
    return [600 + mix(seed + i) % 1000 for i in range(item.length)]
