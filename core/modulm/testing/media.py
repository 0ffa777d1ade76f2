"""A test model with media inputs, whose encoder looks words up in its own embedding table.

A prompt with items therefore gives the same logits as a prompt with the items' words in place,
however steps are split, caches are reused and encoding is scheduled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from modulm.contracts.media import MediaItem
from modulm.contracts.model import Model

__all__ = ["LAYERS", "PLACEHOLDER", "item_of", "place_items", "run_layers", "seeing"]

#: Placeholder token for an item's words in a prompt.
PLACEHOLDER = 3
#: Layers of the fake executor's encoder.
LAYERS = 3


def seeing(base: type[Model]) -> type[Model]:
    """Return the decoder with a media encoder that works in pieces of one word. `encoded` records
    the items that it has encoded.
    """

    class Seeing(base):  # type: ignore[valid-type, misc]
        media: ClassVar[tuple[str, ...]] = ("image",)
        encoded: ClassVar[list[bytes]] = []

        def encode_in_pieces(
            self, items: Sequence[MediaItem]
        ) -> Generator[int, None, Sequence[torch.Tensor]]:
            for item in items:
                yield from [1] * item.length
            return self.encode(items)

        def encode(self, items: Sequence[MediaItem]) -> Sequence[torch.Tensor]:
            self.encoded.extend(item.hash for item in items)
            words = torch.cat([torch.from_numpy(item.tensors["words"]) for item in items])
            both: torch.Tensor = self.embed.lookup(words)
            return torch.split(both, [item.length for item in items])

    return Seeing


def run_layers(
    layers_left: dict[bytes, int], sizes: Mapping[bytes, int], rows: int
) -> tuple[bytes, ...]:
    """Run items through their layers until `rows` rows went through one (0: to the end); return the
    finished items.

    layers_left: hash -> remaining layers. sizes: hash -> rows.
    """
    before, ran = set(layers_left), 0
    while layers_left and (not rows or ran < rows):
        hashed = next(iter(layers_left))
        ran += sizes[hashed]
        layers_left[hashed] -= 1
        if not layers_left[hashed]:
            del layers_left[hashed]
    return tuple(before - layers_left.keys())


def item_of(words: Sequence[int], start: int) -> MediaItem:
    """Return an item of these words, whose placeholders begin at token `start` of the prompt."""
    array = np.array(words, dtype=np.int64)
    digest = hashlib.sha256(array.tobytes()).digest()
    return MediaItem("image", digest, start, len(words), {"words": array})


def place_items(prompt: Sequence[int | Sequence[int]]) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Return (tokens, items) of a prompt in which lists of words stand for items."""
    tokens: list[int] = []
    items: list[MediaItem] = []
    for part in prompt:
        if isinstance(part, int):
            tokens.append(part)
        else:
            items.append(item_of(part, len(tokens)))
            tokens += [PLACEHOLDER] * len(part)
    return tokens, tuple(items)
