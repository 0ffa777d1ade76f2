"""Media containers, opened with FFmpeg through PyAV."""

from __future__ import annotations

import io as streams
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from modulm_media.limits import Undecodable, error_text

__all__ = ["opened"]

#: Formats that contain their media. Playlists of other files (HLS, concat, ...) are excluded.
_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,wav,w64,mp3,aac,flac,asf,gif,"
    "caf,aiff,amr,webp_anim"
)


@contextmanager
def opened(data: bytes) -> Iterator[Any]:
    """Open a file as a container for the duration of the `with` block. Raises Undecodable."""
    import av

    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "none"}
    try:
        with av.open(streams.BytesIO(data), container_options=options) as container:
            yield container
    except (av.FFmpegError, ValueError, IndexError, RuntimeError, TypeError) as error:
        if isinstance(error, Undecodable):
            raise
        raise Undecodable(f"it cannot be decoded: {error_text(error)}") from error
