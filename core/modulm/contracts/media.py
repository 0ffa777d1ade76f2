"""Media inside of prompts: plain values, from the front end to the encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

__all__ = ["API", "DIGEST", "EMBEDS", "MediaItem", "crossed_runs"]

API = 1

#: The kind of an item that brings its embeddings along: no encoder runs for it.
EMBEDS = "embeds"
#: Bytes of a digest of one token's embedding.
DIGEST = 16


@frozen(eq=False)
class MediaItem:
    """One image, sound or video of a prompt, as the checkpoint's processor prepared it.

    kind: "image", "audio", "video". hash: digest of the content and of how it was processed; items
    of equal hash have equal embeddings. start, length: the placeholder tokens of the prompt that
    its embeddings replace, one each. tensors: what the model's encoder takes, by name. spans:
    (first, end) token positions of the prompt that see each other in both directions. cross: the
    item stands for no tokens: layers of cross attention look at its `length` outputs, and `start`
    is 0. seen: the first token of the prompt that does; see `crossed_runs`.

    An item of kind EMBEDS is a prompt, or a part of one, that a caller gives as embeddings: its
    tensor "embeds", [length, hidden] float32, is what the model's own embedding would have made of
    tokens. Its hash has DIGEST bytes for each of them, so that blocks are known by their part of
    it; in prompts 0 stands at its tokens.
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
        """Behind the last token of the prompt that is computed from what the encoder gave."""
        return 1 if self.cross else self.start + self.length

    @property
    def encoded(self) -> bool:
        """Whether an encoder makes its embeddings."""
        return self.kind != EMBEDS

    def digest(self, start: int, end: int) -> bytes:
        """What names the item's part in the prompt's tokens [start, end)."""
        if self.encoded:
            return self.hash
        first = max(start - self.start, 0)
        return self.hash[first * DIGEST : max(end - self.start, 0) * DIGEST]


def crossed_runs(media: Iterable[MediaItem]) -> Sequence[Sequence[MediaItem]]:
    """The items that layers of cross attention look at, in order. Those that are seen from tokens
    side by side on are a run: a token looks at those of the last run that began, as far as they are
    seen, and at no run before.
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
