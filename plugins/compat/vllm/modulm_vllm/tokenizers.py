"""vLLM's `get_tokenizer`: returns transformers tokenizers."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeAlias

from modulm_tokenizers.tokenizer import load_tokenizer

__all__ = ["AnyTokenizer", "get_tokenizer", "that_can_be_awaited"]

AnyTokenizer: TypeAlias = Any


def get_tokenizer(
    tokenizer_name: str | Path,
    *_: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    **__: Any,
) -> Any:
    """Load the transformers tokenizer of a folder or a hub id."""
    return load_tokenizer(tokenizer_name, tokenizer_mode, revision, trust_remote_code).backend


def that_can_be_awaited(tokenizer: Any) -> Any:
    """Make the tokenizer awaitable too, since vLLM's engine returned it both ways."""
    kind = type(tokenizer)
    if not hasattr(kind, "__await__"):
        members = {"__await__": _resolved, "__module__": kind.__module__}
        tokenizer.__class__ = type(kind.__name__, (kind,), members)
    return tokenizer


def _resolved(tokenizer: Any) -> Generator[Any, None, Any]:
    yield from ()
    return tokenizer
