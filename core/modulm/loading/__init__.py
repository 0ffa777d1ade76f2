"""From a model's name to a model with weights: checkpoints, the hub, weight tables, choices."""

from modulm.loading.checkpoint import Checkpoint, open_checkpoint
from modulm.loading.groups import CacheGroup
from modulm.loading.model import Loaded, explain_model, load_model
from modulm.nn.names import Rewrite, WeightNames

__all__ = [
    "CacheGroup",
    "Checkpoint",
    "Loaded",
    "Rewrite",
    "WeightNames",
    "explain_model",
    "load_model",
    "open_checkpoint",
]
