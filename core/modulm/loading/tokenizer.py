"""Open the tokenizer of a configured engine without torch, which front ends may lack."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["open_tokenizer"]


def open_tokenizer(config: EngineConfig, path: str) -> Tokenizer | None:
    """Return the tokenizer of the checkpoint at `path`; None with --skip-tokenizer-init."""
    from modulm.loading.checkpoint import stored_tokenizer
    from modulm.text.tokenizer import load_tokenizer

    model = config.model
    if model.skip_tokenizer_init:
        return None
    return load_tokenizer(
        model.tokenizer or path,
        model.tokenizer_mode,
        model.tokenizer_revision if model.tokenizer else None,
        model.trust_remote_code,
        None if model.tokenizer else stored_tokenizer(config, Path(path)),
    )
