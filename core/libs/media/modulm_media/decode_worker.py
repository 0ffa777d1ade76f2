"""The process that decodes untrusted files, one request at a time, over pipes.

It runs with limited memory and time and writes no files. A request is a JSON header followed by the
file; a response is a header followed by the numbers. Before pixels or samples are decoded, a header
with the bytes that they `need` asks for permission, which a header answers; sound may need more
several times. The reader never executes anything from a response.
"""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
from attrs import asdict
from PIL import Image

from modulm_media.decode import decode
from modulm_media.limits import Limits, Undecodable
from modulm_media.values import Sound, Video

__all__ = ["HEAD", "read_head", "write_head"]

#: Format of the header's length, which precedes it.
HEAD = struct.Struct("<Q")
_LONGEST = 1 << 24
#: Bytes of an image that are written at once.
_STRIP = 1 << 22


def write_head(pipe: IO[bytes], head: Mapping[str, Any]) -> None:
    """Write a header, preceded by its length."""
    data = json.dumps(head).encode()
    pipe.write(HEAD.pack(len(data)) + data)


def read_head(pipe: IO[bytes]) -> dict[str, Any] | None:
    """Read a header; None at the end of the pipe."""
    size = pipe.read(HEAD.size)
    if size is None or len(size) < HEAD.size:
        return None
    (length,) = HEAD.unpack(size)
    data = pipe.read(length) if length <= _LONGEST else b""
    if len(data) < length or not data:
        return None
    head = json.loads(data)
    return head if isinstance(head, dict) else None


class _Refused(Undecodable):
    """The server has no room for the decoded file."""


def _answer(
    question: Mapping[str, Any], data: bytes, replies: IO[bytes]
) -> tuple[dict[str, Any], np.ndarray | Image.Image | None]:
    """Decode one file. Returns (response header, numbers)."""
    settings = question["limits"]
    formats = None if settings["formats"] is None else tuple(settings["formats"])
    limits = Limits(**{**settings, "formats": formats})

    def announce(size: int) -> None:
        write_head(replies, {"needs": size})
        replies.flush()
        permission = read_head(sys.stdin.buffer)
        if permission is None or not permission["granted"]:
            raise _Refused("there is no room for it")

    try:
        value = decode(question["kind"], data, question["io"], limits, announce)
    except Undecodable as error:
        return {"error": str(error)}, None
    except MemoryError:
        return {"error": "it takes too much memory to be decoded"}, None
    if isinstance(value, Sound):
        return {"rate": value.rate}, value.samples
    if isinstance(value, Video):
        metadata = asdict(value, filter=lambda field, _: field.name in ("fps", "total"))
        return {**metadata, "indices": value.frame_indices.tolist()}, value.frames
    return {}, value


def _reply(question: Mapping[str, Any], data: bytes, replies: IO[bytes]) -> None:
    """Decode one file and write the response. Nothing of it is kept."""
    head, numbers = _answer(question, data, replies)
    if numbers is None:
        write_head(replies, head)
    elif isinstance(numbers, Image.Image):  # piece by piece: a copy would be as large again
        width, height = numbers.size
        write_head(replies, {**head, "shape": (height, width, 3), "dtype": "|u1"})
        rows = max(1, _STRIP // (3 * width))
        for top in range(0, height, rows):
            strip = numbers.crop((0, top, width, min(top + rows, height)))
            replies.write(strip.tobytes())
    else:
        write_head(replies, {**head, "shape": numbers.shape, "dtype": numbers.dtype.str})
        replies.write(np.ascontiguousarray(numbers).data)
    replies.flush()


def _serve(memory: int) -> None:
    import resource

    # Output that libraries print must not mix with the responses.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    Image.MAX_IMAGE_PIXELS = None
    for number in (signal.SIGINT, signal.SIGHUP):  # of the terminal, for the owner
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)  # tokens of running streams come first
    while (question := read_head(sys.stdin.buffer)) is not None:
        data = sys.stdin.buffer.read(question["size"])
        # The process ends by itself if its parent has died.
        most = math.ceil(time.process_time() + 4 * question["seconds"] + 1)
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        _reply(question, data, replies)
        data = b""


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
