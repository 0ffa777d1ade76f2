"""Tokenizers as scripts for vLLM get them: those of transformers."""

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
    """The tokenizer of a folder or a hub id, as transformers has it."""
    return load_tokenizer(tokenizer_name, tokenizer_mode, revision, trust_remote_code).backend


def that_can_be_awaited(tokenizer: Any) -> Any:
    """The tokenizer, which `await` gives too: vLLM's engine was asked for it in both ways."""
    kind = type(tokenizer)
    if not hasattr(kind, "__await__"):
        members = {"__await__": _resolved, "__module__": kind.__module__}
        tokenizer.__class__ = type(kind.__name__, (kind,), members)
    return tokenizer


def _resolved(tokenizer: Any) -> Generator[Any, None, Any]:
    yield from ()
    return tokenizer
