"""Hook: the load format bitsandbytes implies the quantization method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modulm.plugins import Proposal, hookimpl

__all__ = ["modulm_config_proposals"]

_NAME = "bitsandbytes"


@hookimpl
def modulm_config_proposals(config: Any) -> Sequence[Proposal] | None:
    """Propose `--quantization bitsandbytes` for `--load-format bitsandbytes`."""
    if config.load.load_format != _NAME:
        return None
    return [Proposal("quantization", _NAME, f"--load-format {_NAME}")]
