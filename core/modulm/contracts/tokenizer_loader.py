"""Tokenizers in formats of their own (group `modulm.tokenizers`, `--tokenizer-mode NAME`).

What transformers reads needs no package. A tokenizer that it does not read, or whose checkpoint
brings code in place of a chat template, comes with a `TokenizerLoader`.
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
    #: Patterns of files that it reads, which a download from the hub must bring beside what every
    #: checkpoint is made of: JSON, texts, templates, `*.model`.
    files: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def claims(cls, folder: Path) -> str | None:
        """A reason why this loader is the one for a checkpoint's folder, or None.

        Asked with `--tokenizer-mode auto` where there is no tokenizer.json or no chat template.
        Look at names of files and at config.json; import nothing heavy.
        """

    @classmethod
    @abstractmethod
    def open(cls, path: str, revision: str | None, trust_remote_code: bool) -> Tokenizer:
        """The tokenizer of the folder or Hugging Face id `path`. Raises CheckpointError."""
