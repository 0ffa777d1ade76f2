"""The hook: who names the loader means the method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modulm.plugins import Proposal, hookimpl

__all__ = ["modulm_config_proposals"]

_NAME = "bitsandbytes"


@hookimpl
def modulm_config_proposals(config: Any) -> Sequence[Proposal] | None:
    """`--load-format bitsandbytes` without `--quantization`."""
    if config.load.load_format != _NAME:
        return None
    return [Proposal("quantization", _NAME, f"--load-format {_NAME}")]
