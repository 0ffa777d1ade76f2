"""Explain what an unsupported folder or model is, and what to use instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modulm.plugins.index import install_hint

__all__ = ["folder_kind", "model_kind", "weights_hint"]

#: Suffixes of weights whose loader has another name.
_LOADERS = {"bin": "pt", "pth": "pt"}


def folder_kind(folder: Path) -> str:
    """Describe a folder without config.json, with advice."""
    if (folder / "model_index.json").exists():
        return "a diffusion pipeline, which generates images; only text models are supported"
    if (adapter := folder / "adapter_config.json").exists():
        try:
            base = json.loads(adapter.read_bytes())["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError):
            base = "its base model"
        flags = f"--enable-lora --lora-modules NAME={folder}"
        return f"a LoRA adapter, not a model: serve {base} with {flags}"
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
    hints = (install_hint("loaders", _LOADERS.get(suffix, suffix)) for suffix in suffixes)
    hint = next(filter(None, hints), "") if "safetensors" not in suffixes else ""
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
