"""Explain what an unsupported folder or model is, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modulm.plugins import manager
from modulm.plugins.index import install_hint

__all__ = ["folder_kind", "model_kind", "weights_hint"]


def folder_kind(folder: Path) -> str:
    """Describe a folder without config.json, with advice."""
    if (folder / "model_index.json").exists():
        return "a diffusion pipeline, which generates images; only text models are supported"
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


def model_kind(config: Mapping[str, Any]) -> str | None:
    """Describe a model that no installed package supports, by its config.json, with advice.

    None for text decoders and encoders.
    """
    hints = (install_hint("models", name) for name in config.get("architectures") or ())
    install = next(filter(None, hints), "")
    if "num_mel_bins" in config or "feat_extract_norm" in config:
        return f"a speech model: {install or 'use transcripts with a text model'}"
    if config.get("is_encoder_decoder"):
        return f"an encoder-decoder: {install or 'no package of this project supports it'}"
    return None
