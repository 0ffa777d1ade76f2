"""Tokenizer loader: one tokenizer format (group `modulm.tokenizers`, `--tokenizer-mode NAME`).

Needed for tokenizers that transformers cannot read, and for checkpoints with code in place of a
chat template.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["API", "TokenizerLoader"]

API = 1


class TokenizerLoader(ABC):
    """Opens one format of tokenizers."""

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    #: Patterns of files to download from the hub, besides those of every checkpoint: JSON, texts,
    #: templates, `*.model`.
    files: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def claims(cls, folder: Path) -> str | None:
        """Return why this loader reads a checkpoint's folder, or None if it does not.

        Called with `--tokenizer-mode auto` if there is no tokenizer.json or no chat template. Look
        only at file names and config.json, and import nothing heavy.
        """

    @classmethod
    @abstractmethod
    def open(cls, path: str, revision: str | None, trust_remote_code: bool) -> Tokenizer:
        """Load the tokenizer of a folder or Hugging Face id. Raises CheckpointError."""
