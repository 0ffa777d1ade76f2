"""What lies beside the weights of a checkpoint: configuration, tokenizer, templates."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["copy_beside", "replace"]

#: Ends of names that are not copied: weights, and what is written anew.
_NEEDLESS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors", ".index.json",
             "config.json")  # fmt: skip
#: What ends so and is copied all the same.
_COPIED = ("generation_config.json", "tokenizer_config.json", "preprocessor_config.json")


def copy_beside(source: Path, folder: Path) -> None:
    """Copy all but the weights and config.json of one checkpoint's folder to another."""
    for file in source.iterdir():
        if file.is_file() and (file.name in _COPIED or not file.name.endswith(_NEEDLESS)):
            shutil.copy2(file, folder / file.name)


def replace(file: Path, content: bytes) -> None:
    """Write a whole file, or leave what was there."""
    unfinished = file.with_name(f"{file.name}.part")
    unfinished.write_bytes(content)
    unfinished.replace(file)
