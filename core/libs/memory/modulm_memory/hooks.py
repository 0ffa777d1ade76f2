"""Hooks: propose settings that fit the memory, refuse weights that do not, and note what a process
held before its model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modulm.plugins import Proposal, hookimpl
from modulm_memory.planning import making_proposals, refusal
from modulm_memory.usage import note_process

__all__ = ["modulm_config_final", "modulm_config_proposals", "modulm_model_built"]


@hookimpl
def modulm_config_proposals(config: Any) -> Sequence[Proposal] | None:
    """Propose a format of the weights for `--quantization auto`, and smaller steps where the
    weights leave little memory.
    """
    if making_proposals.get():
        return None
    from modulm_memory.fitting import proposals

    return proposals(config)


@hookimpl
def modulm_config_final(config: Any) -> None:
    """Refuse weights that do not fit into memory, before they are read. Raises CheckpointError."""
    error = refusal.get()
    if error is not None:
        refusal.set(None)
        raise error()


@hookimpl
def modulm_model_built() -> None:
    """Note the size of the process, for the metric of memory beyond the estimate."""
    note_process()
