"""The logits processors of an engine, for a front end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modulm.plugins import manager

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.sampling import LogitsProcessor

__all__ = ["installed_processors"]


def installed_processors(config: EngineConfig) -> tuple[type[LogitsProcessor], ...]:
    """Return the classes of logits processors. Does not import torch if there are none."""
    plugins = manager.current()
    references = config.model.logits_processors
    if not references and not plugins.names("logits_processors"):
        return ()
    from modulm.engine.sampling.logits_processors import processor_classes

    return processor_classes(references, plugins)
