"""Media inside of prompts: plain values, from the front end to the encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

__all__ = ["API", "MediaItem"]

API = 1


@frozen(eq=False)
class MediaItem:
    """One image, sound or video of a prompt, as the checkpoint's processor prepared it.

    kind: "image", "audio", "video". hash: digest of the content and of how it was processed; items
    of equal hash have equal embeddings. start, length: the placeholder tokens of the prompt that
    its embeddings replace, one each. tensors: what the model's encoder takes, by name. spans:
    (first, end) token positions of the prompt that see each other in both directions.
    """

    kind: str
    hash: bytes
    start: int
    length: int
    tensors: Mapping[str, np.ndarray] = field(factory=dict)
    spans: tuple[tuple[int, int], ...] = ()
