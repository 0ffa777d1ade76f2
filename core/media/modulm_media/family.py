"""Media family: how the prompts of one architecture take media (group `modulm.media_families`).

Named like the architecture. The base class asks the checkpoint's processor for everything, so most
families say only which kinds they take; torch is not imported for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from attrs import frozen

from modulm.errors import RequestError
from modulm_media.values import Media, Sound, Video

__all__ = ["API", "MediaFamily", "Processed"]

API = 1

#: What processors give beside the tensors of a model's encoder.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@frozen(eq=False)
class Processed:
    """What one image, sound or video becomes.

    tokens: [n] int64, what stands in the prompt in place of its placeholder. embedded: [n] bool,
    those that embeddings of the encoder replace. tensors: what the encoder takes, by name. spans:
    (first, end) of tokens, counted from the first, that see each other in both directions.
    """

    kind: str
    tokens: np.ndarray
    embedded: np.ndarray
    tensors: Mapping[str, np.ndarray]
    spans: tuple[tuple[int, int], ...] = ()


class MediaFamily:
    """The prompts of one architecture.

    processor: transformers' of the checkpoint. config: config.json.
    """

    api: ClassVar[int | tuple[int, int]] = API
    #: What its prompts take.
    kinds: ClassVar[tuple[str, ...]] = ("image",)
    #: Whether the tokens of one image see each other in both directions.
    bidirectional: ClassVar[bool] = False

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        self.processor, self.config = processor, config

    def mark(self, kind: str) -> str:
        """The text that stands in a prompt where an item of this kind is to be put."""
        mark: str = getattr(self.processor, f"{kind}_token")
        return mark

    def features(self, kind: str) -> Sequence[int]:
        """The token ids that embeddings replace."""
        for key in (f"{kind}_token_id", f"{kind}_token_index"):
            if isinstance(self.config.get(key), int):
                return (self.config[key],)
        return (int(getattr(self.processor, f"{kind}_token_id")),)

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        """Run the processor over one item; options: its keywords.

        Raises RequestError for media or keywords that the processor refuses.
        """
        try:
            found = self.call(media, options)
        except Exception as error:
            words = f"the model's processor does not take this {media.kind}: {error}"
            raise RequestError(words[:300], "multi_modal_data") from error
        tokens = np.asarray(found["input_ids"][0], dtype=np.int64).ravel()
        embedded = np.isin(tokens, self.features(media.kind))
        spans = _runs(embedded) if self.bidirectional else ()
        return Processed(media.kind, tokens, embedded, self.tensors(found), spans)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the processor makes of one item, with the tokens of its place in `input_ids`."""
        value = media.value
        given: dict[str, Any] = {"images": [value]}
        if isinstance(value, Sound):
            given = {"audio": [value.samples], "sampling_rate": value.rate}
        elif isinstance(value, Video):
            given = {"videos": [value.frames]}
        made: Mapping[str, Any] = self.processor(
            text=[self.mark(media.kind)],
            add_special_tokens=False,
            return_tensors="pt",
            **given,
            **options,
        )
        return made

    def tensors(self, found: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        """The encoder's tensors among what the processor gave."""
        return {name: np.asarray(t) for name, t in found.items() if name not in _OF_TEXT}

    def merged(self, left: int, right: int) -> int | None:
        """The token for two that come to stand side by side, where text and what stands for an
        item meet and a tokenizer would have seen them together; None where they stay two.
        """
        return None

    def positions(
        self, tokens: np.ndarray, items: Sequence[tuple[int, Processed]]
    ) -> np.ndarray | None:
        """[axes, tokens] int64, the positions of a prompt's tokens, for models of several axes.

        items: (first token, item). None: they count from 0, alike on all axes.
        """
        return None


def _runs(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(first, end) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return tuple((int(a), int(b)) for a, b in edges.reshape(-1, 2))
