"""Files of a checkpoint other than weights: configuration, tokenizer, templates."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

__all__ = ["copy_beside", "replace"]

#: Suffixes of files that are not copied: weights, and files that are rewritten.
_NEEDLESS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".index.json",
             "config.json")  # fmt: skip
#: Exceptions: suffixes that are copied.
_COPIED = ("generation_config.json", "tokenizer_config.json", "preprocessor_config.json")


def copy_beside(source: Path, folder: Path) -> None:
    """Copy all files but the weights and config.json from one checkpoint folder to another."""
    for file in source.iterdir():
        if file.is_file() and (file.name in _COPIED or not file.name.endswith(_NEEDLESS)):
            shutil.copy2(file, folder / file.name)


def replace(file: Path, content: bytes) -> None:
    """Write a file atomically. Raises OSError; nothing unfinished is left then."""
    unfinished = file.with_name(f"{file.name}.part")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(file)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
