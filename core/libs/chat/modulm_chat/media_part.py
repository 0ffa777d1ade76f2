"""Media parts of messages: images, audio and video."""

from __future__ import annotations

from typing import Any

__all__ = ["MediaPart"]


class MediaPart(dict[str, Any]):
    """An image, audio or video in a message's content, in the templates' form: {"type": kind}.

    mark: its placeholder in the text, for templates that take contents as strings. leads: whether
    it is put before the message's text there. Clients cannot create one: their parts are plain
    dicts, and their text cannot contain control tokens.
    """

    def __init__(self, kind: str, mark: str, leads: bool = False) -> None:
        super().__init__(type=kind)
        self.mark, self.leads = mark, leads
