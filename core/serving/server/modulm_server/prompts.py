"""Prompts as the server hands them to the engine, and how messages become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from modulm.contracts.media import MediaItem
from modulm_media import MediaPrompt

__all__ = ["ChatOptions", "Prompt"]


@frozen
class Prompt:
    """A prompt in both forms; `text` is None where the client sent ids. `embeds`: parts that are
    embeddings, where ids are 0. media: images, sound and video, whose tokens are among the ids.
    """

    ids: Sequence[int]
    text: str | None = None
    embeds: tuple[MediaItem, ...] = ()
    media: MediaPrompt | None = None

    def given(self) -> dict[str, Any]:
        """The prompt as the engine takes it."""
        found: dict[str, Any] = {"prompt_token_ids": self.ids, "prompt": self.text}
        if self.embeds:
            found["prompt_embeds"] = self.embeds
        if self.media is not None:
            found["multi_modal_data"] = self.media
        return found


@frozen(kw_only=True)
class ChatOptions:
    """How messages are made into a prompt. `template`: source that the client sent, trusted.

    media_io_kwargs, mm_processor_kwargs: how their media are decoded and processed, as the client
    sent it.
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
