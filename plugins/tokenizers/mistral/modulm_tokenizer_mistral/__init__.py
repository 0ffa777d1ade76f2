"""Mistral's tokenizers, tekken.json and tokenizer.model.vN, through mistral-common.

mistral-common is the specification of Mistral's prompts: it validates conversations and encodes
them token by token, so that text never becomes a control token. It is imported when such a
tokenizer is opened.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from modulm.contracts.tokenizer_loader import TokenizerLoader
from modulm.errors import CheckpointError

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["MistralTokenizerLoader", "tokenizer_file"]

_TEKKEN = "tekken.json"
_VERSIONED = re.compile(r".+\.model\.v\d+(m\d+)?")


def tokenizer_file(folder: Path) -> Path | None:
    """Return the tokenizer file in Mistral's format: tekken.json, or the newest
    tokenizer.model.vN.
    """
    if (folder / _TEKKEN).is_file():
        return folder / _TEKKEN
    versions = [path for path in folder.glob("*.model.v*") if _VERSIONED.fullmatch(path.name)]
    return max(versions, key=_version, default=None)


def _version(path: Path) -> tuple[int, str]:
    return int(re.findall(r"\.v(\d+)", path.name)[-1]), path.name


class MistralTokenizerLoader(TokenizerLoader):
    """`--tokenizer-mode mistral`; selected automatically if there is no tokenizer.json."""

    name = "mistral"
    api = 1
    files = ("*.model.v*",)

    @classmethod
    def claims(cls, folder: Path) -> str | None:
        file = tokenizer_file(folder)
        if file is None or (folder / "tokenizer.json").exists():
            return None
        return f"{file.name} and no tokenizer.json"

    @classmethod
    def open(cls, path: str, revision: str | None, trust_remote_code: bool) -> Tokenizer:
        folder = Path(path)
        file = tokenizer_file(folder)
        if file is None and (folder / "tokenizer.model").is_file():
            file = folder / "tokenizer.model"
        if file is None:
            raise CheckpointError(
                f"{path}: tokenizer_mode mistral needs a folder with tekken.json or "
                "tokenizer.model.vN"
            )
        from modulm_tokenizer_mistral.tokenizer import open_tokenizer

        return open_tokenizer(file)
