"""Recognizes kinds of models that are not text decoders or encoders, by their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modulm.plugins import hookimpl
from modulm.plugins.index import install_hint

__all__ = ["modulm_explain_folder", "modulm_explain_model"]

#: Keys that only configurations of speech models have.
_SPEECH = {"num_mel_bins", "feat_extract_norm"}


@hookimpl
def modulm_explain_folder(folder: Path) -> str | None:
    """Recognize a diffusion pipeline."""
    if not (folder / "model_index.json").exists():
        return None
    return "a diffusion pipeline, which generates images; only text models are supported"


@hookimpl
def modulm_explain_model(config: Mapping[str, Any]) -> str | None:
    """Recognize speech models and encoder-decoders, and name the package that supports one."""
    hints = (install_hint("models", name) for name in config.get("architectures") or ())
    install = next(filter(None, hints), "")
    if _SPEECH & config.keys():
        return f"a speech model: {install or 'use transcripts with a text model'}"
    if config.get("is_encoder_decoder"):
        return f"an encoder-decoder: {install or 'no package of this project supports it'}"
    return None
