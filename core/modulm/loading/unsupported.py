"""Explain what an unsupported folder is, and what to use instead."""

from __future__ import annotations

from pathlib import Path

from modulm.plugins import manager
from modulm.plugins.index import install_hint

__all__ = ["folder_kind", "weights_hint"]


def folder_kind(folder: Path) -> str:
    """Describe a folder without config.json, with advice."""
    if (known := manager.current().hook.modulm_explain_folder(folder=folder)) is not None:
        return str(known)
    hint = weights_hint(folder) or "; --hf-config-path may name a folder or hub id that has one"
    return f"file not found, so this is not a checkpoint{hint}"


def weights_hint(path: Path) -> str:
    """Return which package reads the weights at `path`, or which path to use instead; usually
    "".
    """
    if path.is_file() and (path.parent / "config.json").exists():
        return f"; use the folder that contains it, {path.parent}"
    files = [path] if path.is_file() else path.iterdir() if path.is_dir() else ()
    suffixes = sorted({file.suffix.removeprefix(".").lower() for file in files})
    hint = next(filter(None, (install_hint("weights", suffix) for suffix in suffixes)), "")
    return f"; {hint}" if hint else ""
