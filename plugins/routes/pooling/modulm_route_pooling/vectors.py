"""Encodes vectors: as JSON numbers (all, or those that are not 0), base64 in JSON, or bytes."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from modulm_route_pooling.schema import EmbedRequest
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field

__all__ = ["bits", "bytes_response", "is_binary", "encode_vector"]

#: embed_dtype -> torch dtype; the others are numpy's.
_BY_TORCH = {"bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def is_binary(body: EmbedRequest) -> bool:
    """Whether the response is bytes, not JSON."""
    return body.encoding_format in ("bytes", "bytes_only")


def encode_vector(vector: np.ndarray, body: EmbedRequest) -> Any:
    """Encode a vector for JSON: as numbers, as base64 of its bytes, or as those that are not 0."""
    if body.encoding_format == "sparse":
        return _sparse(vector)
    if body.encoding_format == "base64":
        return base64.b64encode(_packed(vector, body)).decode()
    return vector.tolist()


def _sparse(vector: np.ndarray) -> Any:
    """Return the numbers that are not 0 and their indices; of vectors per token, one for each."""
    if vector.ndim > 1:
        return [_sparse(row) for row in vector]
    indices = np.flatnonzero(vector)
    return {"indices": indices.tolist(), "values": vector[indices].tolist()}


def bytes_response(
    vectors: Sequence[np.ndarray], body: EmbedRequest, head: Mapping[str, Any]
) -> Response:
    """Build a response of concatenated vectors. For "bytes", the header `metadata` has offsets.

    head: the fields that a JSON response would start with.
    """
    parts = [_packed(vector, body) for vector in vectors]
    if body.encoding_format == "bytes_only":
        return Response(b"".join(parts), media_type="application/octet-stream")
    items, start = [], 0
    for index, (part, vector) in enumerate(zip(parts, vectors, strict=True)):
        item = {"index": index, "embed_dtype": body.embed_dtype, "endianness": body.endianness}
        items.append({**item, "start": start, "end": start + len(part), "shape": vector.shape})
        start += len(part)
    metadata = json.dumps({**head, "data": items})
    return Response(
        b"".join(parts), media_type="application/octet-stream", headers={"metadata": metadata}
    )


def bits(vector: np.ndarray, signed: bool) -> list[int]:
    """Pack the signs of values into bytes: bit 1 for values >= 0. signed: subtract 128.

    Raises ApiError(400) if the number of values is not a multiple of eight.
    """
    if len(vector) % 8:
        raise bad_field(
            "embedding_types", f"embedding_types: {len(vector)} values are not a multiple of 8"
        )
    packed = np.packbits(vector >= 0).astype(np.int16)
    listed: list[int] = (packed - 128 * signed).tolist()
    return listed


def _packed(vector: np.ndarray, body: EmbedRequest) -> bytes:
    order = sys.byteorder if body.endianness == "native" else body.endianness
    values = np.array(vector, dtype=np.float32)
    if body.embed_dtype in _BY_TORCH:
        raw = _converted(values, _BY_TORCH[body.embed_dtype])
    else:
        raw = values.astype(body.embed_dtype)
    return (raw if order == sys.byteorder else raw.byteswap()).tobytes()


def _converted(values: np.ndarray, dtype: str) -> np.ndarray:
    """Convert values to a format that numpy lacks; returns its bits as integers."""
    try:
        import torch
    except ImportError as error:
        raise ApiError(400, f"embed_dtype: {dtype} needs torch", param="embed_dtype") from error
    tensor = torch.from_numpy(values).to(getattr(torch, dtype))
    bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
    converted: np.ndarray = tensor.view(bits).numpy()
    return converted
