"""vLLM's prompt types: dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypeAlias, TypedDict

from modulm.contracts.outputs import Position

__all__ = [
    "EmbedsPrompt",
    "PromptLogprobs",
    "PromptType",
    "SampleLogprobs",
    "SingletonPrompt",
    "TextPrompt",
    "TokensPrompt",
]


class _Prompt(TypedDict):
    multi_modal_data: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]
    cache_salt: NotRequired[str]


class TextPrompt(_Prompt):
    """A text."""

    prompt: str


class TokensPrompt(_Prompt):
    """Token ids, and the text that they are, where it is known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """prompt_embeds: [tokens, hidden], with enable_prompt_embeds."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


SingletonPrompt: TypeAlias = str | TextPrompt | TokensPrompt | EmbedsPrompt
PromptType: TypeAlias = SingletonPrompt
PromptLogprobs: TypeAlias = list[Position | None]
SampleLogprobs: TypeAlias = list[Position]
