"""Media family: how the prompts of one architecture take media (group `modulm.media_families`).

Named like the architecture. The base class asks the checkpoint's processor for everything, so most
families say only which kinds they take; torch is not imported for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from attrs import evolve

from modulm.errors import RequestError
from modulm_media.values import Media, Processed, Sound, Video, runs_of

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["API", "MediaFamily", "Processed"]

API = 1

#: What processors give beside the tensors of a model's encoder.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class MediaFamily:
    """The prompts of one architecture.

    processor: transformers' of the checkpoint. config: config.json.
    """

    api: ClassVar[int | tuple[int, int]] = API
    #: What its prompts take.
    kinds: ClassVar[tuple[str, ...]] = ("image",)
    #: Whether the tokens of one image see each other in both directions.
    bidirectional: bool = False
    #: Whether all tokens of a prompt with media do, text and images.
    prefix: ClassVar[bool] = False
    #: Whether decoders look at what the encoder gives by cross attention: a prompt is what the
    #: decoder begins with, and the one item that is encoded has no place in it.
    crosses: ClassVar[bool] = False
    #: Whether decoders look so at items which have places in the prompt: from there on, and no
    #: embedding replaces a token.
    looks: ClassVar[bool] = False
    #: Whether what is encoded is the prompt's own text. The processor is None then.
    reads_text: ClassVar[bool] = False
    #: For image processors that transformers makes only where there is torchvision, those that are
    #: made elsewhere ("module:Class"): by their names in files, without "Fast" behind them.
    image_processors: ClassVar[Mapping[str, str]] = {}
    #: transformers' video processor, where it has another model's name than the processor.
    video_processor: ClassVar[str | None] = None

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        self.processor, self.config = processor, config

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        """The checkpoint's processor. What this raises is told with the checkpoint's path."""
        return files.processor(cls.image_processors, cls.video_processor)

    def mark(self, kind: str) -> str:
        """The text that stands in a prompt where an item of this kind is to be put."""
        mark: str = getattr(self.processor, f"{kind}_token")
        return mark

    def document(self, kind: str, alone: bool) -> str:
        """What stands for an item in a prompt of a retrieval model that no chat template writes;
        alone: there is nothing else in it.
        """
        return self.mark(kind)

    def mark_tokens(self, kind: str) -> Sequence[int] | None:
        """The token ids of the mark, None: what the tokenizer makes of it."""
        return None

    def features(self, kind: str) -> Sequence[int]:
        """The token ids that embeddings replace."""
        for key in (f"{kind}_token_id", f"{kind}_token_index"):
            if isinstance(self.config.get(key), int):
                return (self.config[key],)
        return (int(getattr(self.processor, f"{kind}_token_id")),)

    @property
    def rate(self) -> int:
        """Samples a second of the sound that the processor takes."""
        hears = getattr(self.processor, "feature_extractor", None)
        return int(getattr(hears, "sampling_rate", 16000))

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
        spans = runs_of(embedded) if self.bidirectional else ()
        made = Processed(media.kind, tokens, embedded, self.tensors(found), spans)
        return evolve(made, given=self.given(made)) if self.looks else made

    def given(self, made: Processed) -> int:
        """How many outputs the encoder gives for an item, in a family that `looks`."""
        return len(made.tokens)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the processor makes of one item, with the tokens of its place in `input_ids`."""
        value = media.value
        given: dict[str, Any] = {"images": [value]}
        if isinstance(value, Sound):
            given = {"audio": [value.at(self.rate).samples], "sampling_rate": self.rate}
        elif isinstance(value, Video):
            given = {"videos": [value.frames], "video_metadata": [value.metadata()]}
            options = {"do_sample_frames": False, **options}
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

    def beside(self, kind: str, kinds: Collection[str]) -> Mapping[str, np.ndarray]:
        """Tensors that the encoder takes for an item of this kind besides those of `process`, in a
        prompt with items of `kinds`.
        """
        return {}

    def completed(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        """A prompt's tokens with those that the processor adds to the text around its items.

        mark: the tokens of an item's placeholder.
        """
        return tokens

    def gathered(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, Sequence[Media]]:
        """A prompt's tokens and media, where several media become one item.

        options: the processor's keywords. Raises RequestError for media that do not go together.
        """
        return tokens, media

    def start(self) -> Sequence[int]:
        """The tokens that a decoder begins with where a prompt says none."""
        first = self.config.get("decoder_start_token_id", self.config.get("bos_token_id"))
        tokens = [first, self.config.get("forced_bos_token_id")]
        return [token for token in tokens if isinstance(token, int)]

    def text(self, tokens: np.ndarray) -> Processed:
        """What a text becomes in a family that reads texts; tokens: [n] int64."""
        nothing = np.zeros(0, dtype=np.int64)
        given = {"input_ids": tokens}
        return Processed("text", nothing, nothing.astype(bool), given, given=len(tokens))

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
