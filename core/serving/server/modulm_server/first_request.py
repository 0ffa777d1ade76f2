"""The sample request in the server's banner, chosen for the model's task."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["first_request"]


def first_request(
    model: str, tasks: Collection[str], chats: bool = True, speaks: bool = False
) -> tuple[str, str]:
    """A sample request for the model, as (path, JSON body).

    tasks: the model's tasks, from the engine. chats: whether it has a chat template. speaks:
    whether it answers in sound.
    """
    speech = "/v1/audio/speech", {"input": "Hello!", "response_format": "wav"}
    path, fields = speech if speaks else _choose(tasks, chats)
    return path, json.dumps({"model": model, **fields})


def _choose(tasks: Collection[str], chats: bool) -> tuple[str, dict[str, Any]]:
    if "generate" in tasks and chats:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    if "generate" in tasks:
        return "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}
    if "score" in tasks:
        documents = ["Bread is made of flour.", "The Alps are mountains."]
        return "/rerank", {"query": "How do I bake a loaf?", "documents": documents}
    if "embed" in tasks:
        return "/v1/embeddings", {"input": ["Hello!", "Good morning!"]}
    if "classify" in tasks:
        return "/classify", {"input": ["Hello!"]}
    return "/pooling", {"input": ["Hello!"]}
