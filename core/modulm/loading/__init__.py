"""Load models: checkpoints, hub downloads, weight tables, choice of drivers.

Names are imported on first use: a front end opens checkpoints without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.weight_names import Rewrite, WeightNames
    from modulm.loading.cache_groups import CacheGroup
    from modulm.loading.checkpoint import open_checkpoint, pooling_recipe, stored_tokenizer
    from modulm.loading.model import Loaded, explain_model, load_model
    from modulm.loading.resolved import ResolvedCheckpoint, resolve_checkpoint

__all__ = [
    "CacheGroup",
    "Checkpoint",
    "Loaded",
    "ResolvedCheckpoint",
    "Rewrite",
    "WeightNames",
    "explain_model",
    "load_model",
    "open_checkpoint",
    "pooling_recipe",
    "resolve_checkpoint",
    "stored_tokenizer",
]

_HOMES = {
    "CacheGroup": "modulm.loading.cache_groups",
    "Checkpoint": "modulm.contracts.checkpoint",
    "Loaded": "modulm.loading.model",
    "ResolvedCheckpoint": "modulm.loading.resolved",
    "Rewrite": "modulm.contracts.weight_names",
    "WeightNames": "modulm.contracts.weight_names",
    "explain_model": "modulm.loading.model",
    "load_model": "modulm.loading.model",
    "open_checkpoint": "modulm.loading.checkpoint",
    "pooling_recipe": "modulm.loading.checkpoint",
    "resolve_checkpoint": "modulm.loading.resolved",
    "stored_tokenizer": "modulm.loading.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
