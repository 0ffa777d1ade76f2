"""Media families: how an architecture's prompts take media (group `modulm.media_families`).

A family is registered under the architecture's name. The base class delegates everything to the
checkpoint's processor, so most families only declare their kinds. torch is not imported here.
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

#: Outputs of processors that are not inputs of the model's encoder.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class MediaFamily:
    """How the prompts of one architecture take media.

    processor: the checkpoint's transformers processor. config: config.json.
    """

    api: ClassVar[int | tuple[int, int]] = API
    #: Kinds of media that prompts may have.
    kinds: ClassVar[tuple[str, ...]] = ("image",)
    #: Whether the tokens of one image attend to each other in both directions.
    bidirectional: bool = False
    #: Whether all tokens of a prompt with media, text and images, attend in both directions.
    prefix: ClassVar[bool] = False
    #: Whether the tokens of all items of a prompt attend to each other, across the text between
    #: them, which sees only what is before it. `Processed.spans` say which tokens do.
    together: ClassVar[bool] = False
    #: Whether the decoder reads the encoder output by cross attention only: the prompt is the
    #: beginning of the decoder's text, and its only encoded item has no placeholder.
    crosses: ClassVar[bool] = False
    #: Whether the decoder reads items by cross attention from their placeholders on; no token
    #: embedding is replaced.
    looks: ClassVar[bool] = False
    #: Whether the encoder reads the prompt's own text. `processor` is None then.
    reads_text: ClassVar[bool] = False
    #: Replacements ("module:Class") for image processors that transformers only builds with
    #: torchvision, by their class names in files, without the suffix "Fast".
    image_processors: ClassVar[Mapping[str, str]] = {}
    #: `--video-pruning-rate`, for families of models that leave out tokens of videos.
    video_pruning_rate: float = 0.0
    #: transformers' video processor, if it is named after another model than the processor.
    video_processor: ClassVar[str | None] = None

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        self.processor, self.config = processor, config

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        """Create the checkpoint's processor. Errors are reported with the checkpoint's path."""
        return files.processor(cls.image_processors, cls.video_processor)

    def mark(self, kind: str) -> str:
        """The placeholder text of an item of this kind in a prompt."""
        mark: str = getattr(self.processor, f"{kind}_token")
        return mark

    def document(self, kind: str, is_only_item: bool) -> str:
        """Text that stands for an item in a retrieval prompt without a chat template.

        is_only_item: whether the prompt holds nothing else.
        """
        return self.mark(kind)

    def mark_tokens(self, kind: str) -> Sequence[int] | None:
        """Token ids of the placeholder; None means that the tokenizer encodes `mark`."""
        return None

    def features(self, kind: str) -> Sequence[int]:
        """Token ids that are replaced by embeddings."""
        for key in (f"{kind}_token_id", f"{kind}_token_index"):
            if isinstance(self.config.get(key), int):
                return (self.config[key],)
        return (int(getattr(self.processor, f"{kind}_token_id")),)

    @property
    def rate(self) -> int:
        """Sample rate that the processor expects, in Hz."""
        hears = getattr(self.processor, "feature_extractor", None)
        return int(getattr(hears, "sampling_rate", 16000))

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        """Process one item; options: keyword arguments of the processor.

        Raises RequestError for media or options that the processor rejects.
        """
        try:
            outputs = self.call(media, options)
        except Exception as error:
            message = f"the model's processor rejected this {media.kind}: {error}"
            raise RequestError(message[:300], "multi_modal_data") from error
        tokens = np.asarray(outputs["input_ids"][0], dtype=np.int64).ravel()
        embedded = np.isin(tokens, self.features(media.kind))
        spans = runs_of(embedded) if self.bidirectional else ()
        processed = Processed(media.kind, tokens, embedded, self.tensors(outputs), spans)
        return (
            evolve(processed, encoder_outputs=self.encoder_outputs(processed))
            if self.looks
            else processed
        )

    def encoder_outputs(self, processed: Processed) -> int:
        """Number of encoder outputs for an item, in a family that `looks`."""
        return len(processed.tokens)

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call the processor for one item; `input_ids` of its output are the placeholder's
        tokens.
        """
        value = media.value
        arguments: dict[str, Any] = {"images": [value]}
        if isinstance(value, Sound):
            arguments = {"audio": [value.at(self.rate).samples], "sampling_rate": self.rate}
        elif isinstance(value, Video):
            arguments = {"videos": [value.frames], "video_metadata": [value.metadata()]}
            options = {"do_sample_frames": False, **options}
        outputs: Mapping[str, Any] = self.processor(
            text=[self.mark(media.kind)],
            add_special_tokens=False,
            return_tensors="pt",
            **arguments,
            **options,
        )
        return outputs

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        """The encoder's inputs among the processor's outputs."""
        return {name: np.asarray(t) for name, t in outputs.items() if name not in _OF_TEXT}

    def extra_tensors(self, kind: str, kinds: Collection[str]) -> Mapping[str, np.ndarray]:
        """Additional encoder inputs for an item of this kind in a prompt with items of `kinds`."""
        return {}

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        """Add the tokens that the processor writes around items to a prompt's tokens.

        mark: the tokens of an item's placeholder.
        """
        return tokens

    def group_media(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, Sequence[Media]]:
        """Combine media that form one item; returns the prompt's tokens and media.

        options: the processor's keyword arguments. Raises RequestError for media that do not fit
        together.
        """
        return tokens, media

    def needs_values(self, options: Mapping[str, Any]) -> bool:
        """Whether `group_media` reads images, sounds or videos themselves, not only their number.

        All of a prompt are then held at once; otherwise each is dropped when it is processed.
        options: the processor's keyword arguments.
        """
        return type(self).group_media is not MediaFamily.group_media

    def start(self) -> Sequence[int]:
        """Decoder tokens to begin with if the prompt has none."""
        first = self.config.get("decoder_start_token_id", self.config.get("bos_token_id"))
        tokens = [first, self.config.get("forced_bos_token_id")]
        return [token for token in tokens if isinstance(token, int)]

    def text(self, tokens: np.ndarray) -> Processed:
        """Processed text, in a family whose encoder reads text; tokens: [n] int64."""
        nothing = np.zeros(0, dtype=np.int64)
        tensors = {"input_ids": tokens}
        return Processed(
            "text", nothing, nothing.astype(bool), tensors, encoder_outputs=len(tokens)
        )

    def merged_token(self, left: int, right: int) -> int | None:
        """Return the single token for two adjacent tokens where text and an item meet.

        A tokenizer that saw both together would have merged them. None keeps the two tokens.
        """
        return None

    def positions(
        self, tokens: np.ndarray, items: Sequence[tuple[int, Processed]]
    ) -> np.ndarray | None:
        """[axes, tokens] int64 positions of a prompt's tokens, for models with several axes.

        items: (first token, item). None means that all axes count from 0.
        """
        return None
