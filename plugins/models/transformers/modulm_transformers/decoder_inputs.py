"""What a decoder reads of an image besides its embeddings, in columns beside them.

Early layers of some decoders add further encoder features to the tokens of images (DeepStack, arXiv
2406.04334). They have a mask of these tokens and features for some layers as arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from modulm.errors import UnsupportedError

__all__ = ["OF_TEXT", "DecoderInputs"]

#: Decoder inputs that do not depend on images, and the embeddings.
OF_TEXT = frozenset(
    {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position"}
    | {"past_key_values", "use_cache", "kwargs"}
)


@frozen
class DecoderInputs:
    """The arguments that columns beside embeddings stand for, alike for all items of a model.

    masks: argument -> shape of a token's entries in the mask of image tokens. features: argument ->
    the keys of its tensors, in the columns' order. keyed: those that are mappings, others are
    lists.
    """

    masks: Mapping[str, tuple[int, ...]]
    features: Mapping[str, tuple[Any, ...]]
    keyed: frozenset[str]

    @classmethod
    def pack(cls, name: str, inputs: Mapping[str, Any]) -> tuple[DecoderInputs, Tensor]:
        """Return the layout, and [tokens, width] of an item: embeddings, then the columns.

        name: the model's. inputs: the decoder's arguments for one item. Raises UnsupportedError for
        arguments that are neither a mask of tokens nor features of those.
        """
        embeds = inputs["inputs_embeds"][0]
        further = {
            key: value
            for key, value in inputs.items()
            if key not in OF_TEXT and any(isinstance(one, Tensor) for _, one in _entries(value))
        }
        masks = {key: value for key, value in further.items() if _is_mask(value, len(embeds))}
        columns = [embeds]
        for key, value in further.items():
            if key in masks:
                continue
            entries = [one for _, one in _entries(value)]
            seen = next(iter(masks.values())).reshape(len(embeds), -1)[:, 0] if masks else None
            shape = (0 if seen is None else int(seen.sum()), embeds.shape[1])
            if seen is None or isinstance(value, Tensor) or any(e.shape != shape for e in entries):
                raise UnsupportedError(f"{name}: not supported yet: decoder input {key} of images")
            for entry in entries:
                column = torch.zeros_like(embeds)
                column[seen] = entry.to(embeds.dtype)
                columns.append(column)
        features = {k: tuple(i for i, _ in _entries(further[k])) for k in further if k not in masks}
        layout = cls(
            {key: tuple(value.shape[2:]) for key, value in masks.items()},
            features,
            frozenset(key for key in features if isinstance(further[key], Mapping)),
        )
        return layout, torch.cat(columns, dim=1) if len(columns) > 1 else embeds

    def arguments(self, embeds: Tensor, mask: Tensor, hidden: int) -> dict[str, Any]:
        """The arguments for a step. embeds: [tokens, width]. mask: [tokens], of images and the
        tokens between their parts, whose columns are 0.
        """
        columns = iter(embeds[mask].split(hidden, dim=1)[1:])
        arguments: dict[str, Any] = {}
        for key, shape in self.masks.items():
            arguments[key] = mask.view(1, -1, *[1] * len(shape)).expand(1, -1, *shape)
        for key, keys in self.features.items():
            entries = {index: next(columns) for index in keys}
            arguments[key] = entries if key in self.keyed else list(entries.values())
        return arguments


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """(key, tensor) of a mapping or sequence; an argument that is none is its own entry."""
    if isinstance(value, Mapping):
        yield from value.items()
    else:
        yield from enumerate(value if isinstance(value, list | tuple) else [value])


def _is_mask(value: Any, tokens: int) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.bool
        and tuple(value.shape[:2]) == (1, tokens)
    )
