"""Plain values and numpy arrays as bytes, with msgpack.

Used by both codecs: between front end and engine, and between engine and workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import attrs
import msgspec
import numpy as np

from modulm.contracts.executor import RowLogprobs
from modulm.contracts.media import MediaItem
from modulm.contracts.sampling import OutputKind, PoolingParams, SamplingParams, StructuredOutputs

__all__ = [
    "changed",
    "decode",
    "encode",
    "pack_arrays",
    "pack_logprobs",
    "pack_media",
    "pack_params",
    "unpack_arrays",
    "unpack_logprobs",
    "unpack_media",
    "unpack_params",
]

_ARRAY = 1
#: Bytes whose multiples are the offsets of several arrays.
_ALIGNED = 8


def _extension(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgspec.msgpack.Ext(_ARRAY, _head(value.dtype, value.shape) + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not plain data")


def _array(code: int, data: memoryview) -> np.ndarray:
    """Decode an array as a copy, which is writable and aligned."""
    start = 2 + int.from_bytes(data[:2], "big")
    dtype, shape = _kind(bytes(data[2:start]))
    array: np.ndarray = np.frombuffer(bytearray(data[start:]), dtype=dtype)
    return array if len(shape) == 1 else array.reshape(shape)


@lru_cache(maxsize=1024)
def _head(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Encode an array's header: its length, then dtype and shape."""
    head = msgspec.msgpack.encode((dtype.str, shape))
    return len(head).to_bytes(2, "big") + head


@lru_cache(maxsize=1024)
def _kind(head: bytes) -> tuple[np.dtype, tuple[int, ...]]:
    """Decode dtype and shape from a header without its length."""
    name, shape = msgspec.msgpack.decode(head)
    return np.dtype(name), tuple(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_extension)
_decoder = msgspec.msgpack.Decoder(ext_hook=_array)


def encode(value: Any) -> bytes:
    """Encode plain values and arrays. Raises TypeError for anything else."""
    return _encoder.encode(value)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Decode a value; tuples become lists."""
    return _decoder.decode(data)


def pack_arrays(arrays: Sequence[np.ndarray]) -> bytes:
    """Encode several arrays at once, which takes a fraction of the time of one by one."""
    pieces = [_heads(tuple([(array.dtype, array.shape) for array in arrays]))]
    for array in arrays:
        pieces.append(array.tobytes())
        if rest := -array.nbytes % _ALIGNED:
            pieces.append(bytes(rest))
    return b"".join(pieces)


def unpack_arrays(data: bytes | bytearray | memoryview) -> list[np.ndarray]:
    """Decode arrays as parts of one copy, which are writable and aligned."""
    start = int.from_bytes(data[:4], "big")
    buffer = bytearray(data[start:])
    return [
        np.frombuffer(buffer, dtype, count, at)
        if shape is None
        else np.frombuffer(buffer, dtype, count, at).reshape(shape)
        for dtype, count, at, shape in _kinds(bytes(data[4:start]))
    ]


@lru_cache(maxsize=1024)
def _heads(kinds: tuple[tuple[np.dtype, tuple[int, ...]], ...]) -> bytes:
    """Encode the header of several arrays: its length, then dtypes and shapes."""
    head = msgspec.msgpack.encode([(dtype.str, shape) for dtype, shape in kinds])
    return (len(head) + 4).to_bytes(4, "big") + head


@lru_cache(maxsize=1024)
def _kinds(head: bytes) -> list[tuple[np.dtype, int, int, tuple[int, ...] | None]]:
    """Decode the header of several arrays: dtype, elements, offset, and shape if not [n], of
    each.
    """
    found, at = [], 0
    for name, sizes in msgspec.msgpack.decode(head):
        dtype, shape = np.dtype(name), tuple(sizes)
        count = math.prod(shape)
        found.append((dtype, count, at, None if len(shape) == 1 else shape))
        at += count * dtype.itemsize
        at += -at % _ALIGNED
    return found


def changed(value: Any) -> dict[str, Any]:
    """Return the fields of an attrs value that differ from their defaults."""
    return {
        spec.name: current
        for spec in attrs.fields(type(value))
        if (current := getattr(value, spec.name)) != spec.default
    }


def pack_params(params: SamplingParams | PoolingParams) -> list[Any]:
    table = changed(params)
    if isinstance(params, PoolingParams):
        return ["pooling", table]
    if params.structured_outputs is not None:
        table["structured_outputs"] = changed(params.structured_outputs)
    if "output_kind" in table:
        table["output_kind"] = params.output_kind.value
    return ["sampling", table]


def unpack_params(packed: list[Any]) -> SamplingParams | PoolingParams:
    kind, table = packed
    if kind == "pooling":
        return PoolingParams(**table)
    if "structured_outputs" in table:
        table["structured_outputs"] = StructuredOutputs(**table["structured_outputs"])
    if "output_kind" in table:
        table["output_kind"] = OutputKind(table["output_kind"])
    return SamplingParams(**table)


def pack_media(items: Iterable[MediaItem]) -> list[Any]:
    return [
        [i.kind, i.hash, i.start, i.length, dict(i.tensors), i.spans, i.cross, i.seen]
        for i in items
    ]


def unpack_media(packed: list[Any]) -> tuple[MediaItem, ...]:
    return tuple(
        MediaItem(kind, digest, start, length, tensors, tuple(map(tuple, spans)), cross, seen)
        for kind, digest, start, length, tensors, spans, cross, seen in packed
    )


def pack_logprobs(entries: Iterable[RowLogprobs]) -> list[Any]:
    return [[entry.ids, entry.values, entry.rank] for entry in entries]


def unpack_logprobs(packed: list[Any]) -> tuple[RowLogprobs, ...]:
    return tuple(RowLogprobs(*entry) for entry in packed)
