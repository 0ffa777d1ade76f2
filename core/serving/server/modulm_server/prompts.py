"""The server's prompts, and the options of chat rendering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from modulm.contracts.media import MediaItem
from modulm_media import MediaPrompt

__all__ = ["ChatOptions", "Prompt"]


@frozen
class Prompt:
    """A prompt as token ids and text; `text` is None if the client sent ids.

    embeds: parts that are embeddings, whose ids are 0. media: images, audio and video, whose
    tokens are among the ids.
    """

    ids: Sequence[int]
    text: str | None = None
    embeds: tuple[MediaItem, ...] = ()
    media: MediaPrompt | None = None

    def engine_prompt(self) -> dict[str, Any]:
        """Build the prompt for the engine."""
        fields: dict[str, Any] = {"prompt_token_ids": self.ids, "prompt": self.text}
        if self.embeds:
            fields["prompt_embeds"] = self.embeds
        if self.media is not None:
            fields["multi_modal_data"] = self.media
        return fields


@frozen(kw_only=True)
class ChatOptions:
    """Options for rendering messages into a prompt.

    template: template source from the client, if the server allows it. media_io_kwargs,
    mm_processor_kwargs: the client's options for decoding and processing media.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] | None = None
    template: str | None = None
    variables: Mapping[str, Any] = field(factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
