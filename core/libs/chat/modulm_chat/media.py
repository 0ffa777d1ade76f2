"""Parts of messages that are no text: a template writes their placeholder, or it is written."""

from __future__ import annotations

from typing import Any

__all__ = ["MediaPart"]


class MediaPart(dict[str, Any]):
    """An image, a sound or a video in a message's content, as templates want it: {"type": kind}.

    mark: what stands for it in the text, for templates that want contents as strings. No client
    can send one: what clients send are plain tables, whose text is sealed.
    """

    def __init__(self, kind: str, mark: str) -> None:
        super().__init__(type=kind)
        self.mark = mark
