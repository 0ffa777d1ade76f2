"""Several models in one server, each an engine of its own behind the same front end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.config import EngineConfig

__all__ = ["serves_several"]


def serves_several(config: EngineConfig, models: Sequence[str]) -> bool:
    """Whether a server has several models, or may get more. models: of the command line."""
    from modulm_server.models.flags import ModelsConfig

    flags = config.group(ModelsConfig)
    return len(models) > 1 or flags.models_config is not None or flags.models_dir is not None
