"""What cannot run, told by its name: what a folder or a model is, and what works instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modulm.plugins.index import install_hint

__all__ = ["folder_kind", "model_kind", "weights_hint"]

#: Suffixes of weights whose loader is not called by them.
_LOADERS = {"bin": "pt", "pth": "pt"}


def folder_kind(folder: Path) -> str:
    """What a folder without config.json is, and what to do with it."""
    if (folder / "model_index.json").exists():
        return "a diffusion pipeline, which makes pictures; models that write text run here"
    if (adapter := folder / "adapter_config.json").exists():
        try:
            base = json.loads(adapter.read_bytes())["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError):
            base = "its base model"
        flags = f"--enable-lora --lora-modules NAME={folder}"
        return f"a LoRA adapter, not a model: serve {base} with {flags}"
    hint = weights_hint(folder) or "; --hf-config-path may name a folder or hub id that has one"
    return f"there is no such file, so this is no checkpoint{hint}"


def weights_hint(path: Path) -> str:
    """Which package reads the weights at `path`, or what to give instead; mostly nothing."""
    if path.is_file() and (path.parent / "config.json").exists():
        return f"; give the folder that it is in, {path.parent}"
    files = [path] if path.is_file() else path.iterdir() if path.is_dir() else ()
    suffixes = sorted({file.suffix.removeprefix(".").lower() for file in files})
    hints = (install_hint("loaders", _LOADERS.get(suffix, suffix)) for suffix in suffixes)
    found = next(filter(None, hints), "") if "safetensors" not in suffixes else ""
    return f"; {found}" if found else ""


def model_kind(config: Mapping[str, Any]) -> str | None:
    """What a model is that none of the installed packages has, by its config.json, and what helps.

    None for decoders and encoders of text.
    """
    hints = (install_hint("models", name) for name in config.get("architectures") or ())
    install = next(filter(None, hints), "")
    if "num_mel_bins" in config or "feat_extract_norm" in config:
        return f"a speech model: {install or 'give transcripts to a model of text'}"
    if config.get("is_encoder_decoder"):
        return f"an encoder-decoder: {install or 'no package of this project has its architecture'}"
    return None
