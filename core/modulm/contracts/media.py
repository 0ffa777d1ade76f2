"""Media items of prompts: plain values, passed from the front end to the encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

__all__ = ["API", "DIGEST", "EMBEDS", "MediaItem", "crossed_runs"]

API = 1

#: The kind of an item given as embeddings; no encoder runs for it.
EMBEDS = "embeds"
#: Size in bytes of the digest of one token's embedding.
DIGEST = 16


@frozen(eq=False)
class MediaItem:
    """One image, sound or video of a prompt, prepared by the checkpoint's processor.

    kind: "image", "audio", "video". hash: digest of content and processing; items with equal hashes
    have equal embeddings. start, length: placeholder tokens of the prompt that are replaced by the
    embeddings. tensors: inputs of the encoder, by name. spans: (first, end) positions of prompt
    tokens that see each other in both directions. cross: the item has no placeholder tokens;
    cross-attention layers read its `length` outputs, and `start` is 0. seen: the first prompt token
    that reads them; see `crossed_runs`.

    An item of kind EMBEDS is (part of) a prompt given as embeddings. Its tensor "embeds", [length,
    hidden] float32, takes the place of the model's token embeddings. Its hash has DIGEST bytes per
    token, so that each block is named by its part of the hash. Its prompt tokens are 0.
    """

    kind: str
    hash: bytes
    start: int
    length: int
    tensors: Mapping[str, np.ndarray] = field(factory=dict)
    spans: tuple[tuple[int, int], ...] = ()
    cross: bool = False
    seen: int = 0

    @property
    def end(self) -> int:
        """End (exclusive) of the prompt tokens that are computed from the encoder's output."""
        return 1 if self.cross else self.start + self.length

    @property
    def encoded(self) -> bool:
        """Whether an encoder computes the embeddings."""
        return self.kind != EMBEDS

    def digest(self, start: int, end: int) -> bytes:
        """Return the part of the hash for the prompt tokens [start, end)."""
        if self.encoded:
            return self.hash
        first = max(start - self.start, 0)
        return self.hash[first * DIGEST : max(end - self.start, 0) * DIGEST]


def crossed_runs(media: Iterable[MediaItem]) -> Sequence[Sequence[MediaItem]]:
    """Group the items read by cross attention into runs.

    Items whose `seen` tokens are adjacent form a run. A token reads only items of the last run
    that has begun before it, and of those only items it has seen.
    """
    runs: list[list[MediaItem]] = []
    for item in media:
        if not item.cross:
            continue
        if runs and item.seen == runs[-1][-1].seen + 1:
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs
