"""A model that takes media, for tests: its encoder looks words up in its own embedding table.

So a prompt with items gives the same logits as the prompt in which the items' words stand
themselves, whatever the steps cut, the caches keep and the scheduler puts off.
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

#: The token that stands in a prompt where an item's words are to be put.
PLACEHOLDER = 3
#: Of the fake executor's encoder.
LAYERS = 3


def seeing(base: type[Model]) -> type[Model]:
    """The decoder with an encoder of media, in pieces of a word. `encoded` counts the items that it
    has encoded.
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


def run_layers(begun: dict[bytes, int], sizes: Mapping[bytes, int], rows: int) -> tuple[bytes, ...]:
    """Take items through their layers until so many rows went through one (0: to their ends); those
    that are done. begun: hash -> layers that are left; sizes: hash -> rows.
    """
    before, ran = set(begun), 0
    while begun and (not rows or ran < rows):
        hashed = next(iter(begun))
        ran += sizes[hashed]
        begun[hashed] -= 1
        if not begun[hashed]:
            del begun[hashed]
    return tuple(before - begun.keys())


def item_of(words: Sequence[int], start: int) -> MediaItem:
    """An item of these words, whose placeholders begin at token `start` of the prompt."""
    array = np.array(words, dtype=np.int64)
    digest = hashlib.sha256(array.tobytes()).digest()
    return MediaItem("image", digest, start, len(words), {"words": array})


def place_items(prompt: Sequence[int | Sequence[int]]) -> tuple[list[int], tuple[MediaItem, ...]]:
    """(tokens, items) of a prompt in which lists of words stand for items."""
    tokens: list[int] = []
    items: list[MediaItem] = []
    for part in prompt:
        if isinstance(part, int):
            tokens.append(part)
        else:
            items.append(item_of(part, len(tokens)))
            tokens += [PLACEHOLDER] * len(part)
    return tokens, tuple(items)
