"""The hook that chooses the parsers for checkpoints of this package's recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.plugins import Choice, hookimpl

if TYPE_CHECKING:
    from modulm.contracts.quantization import CheckpointInfo

__all__ = ["modulm_choose_parser"]

_PARSERS = {"tool_parsers": "hermes", "reasoning_parsers": "qwen3"}


@hookimpl(trylast=True)
def modulm_choose_parser(kind: str, checkpoint: CheckpointInfo) -> Choice | None:
    """The tags that the recipe trains on, wherever the checkpoint lies."""
    if checkpoint.config.get("recipe") != "modulm-demo" or kind not in _PARSERS:
        return None
    return Choice(_PARSERS[kind], "modulm-demo was trained on its tags")
