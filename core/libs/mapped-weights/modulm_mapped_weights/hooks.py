"""Hooks that fill models with mapped weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from modulm.config.environ import variables
from modulm.errors import ConfigError, UnsupportedError
from modulm.plugins import hookimpl
from modulm_mapped_weights.flags import MappedWeightsFlags

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["modulm_model_built", "modulm_model_loaded"]

_GIB = 2**30

#: Models that have been filled.
_FILLED: WeakSet[Any] = WeakSet()


@hookimpl
def modulm_model_built(model: Any, config: EngineConfig, fillers: list[Any]) -> None:
    """Fill models from mapped files with --weights-memory mmap."""
    flags = config.group(MappedWeightsFlags)
    if flags.weights_memory != "mmap":
        return
    import torch

    from modulm_mapped_weights.filling import Filler
    from modulm_mapped_weights.folder import CacheFolder

    path = Path(flags.weights_cache_dir or _default_folder()).expanduser()
    filler = Filler(CacheFolder(path, int(flags.weights_cache_size * _GIB)), config)

    def fill(plan: Any, loader: Any, *, device: Any, progress: bool) -> None:
        if device != torch.device("cpu"):
            raise ConfigError(
                "weights_memory",
                f"mmap: weights on {device} are not in host memory; use private",
            )
        filler.fill(plan, loader, device=device, progress=progress)
        _FILLED.add(model)

    fillers.append(fill)


@hookimpl
def modulm_model_loaded(model: Any, config: EngineConfig) -> None:
    """Refuse --weights-memory mmap for models that load their weights themselves."""
    if config.group(MappedWeightsFlags).weights_memory == "mmap" and model not in _FILLED:
        raise UnsupportedError(
            "--weights-memory mmap: not for models that load their weights themselves; use private"
        )


def _default_folder() -> Path:
    return Path(variables().get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modulm" / "weights"
