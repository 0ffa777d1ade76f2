"""What builds models and takes in their weights: the `Builder`, the modules that it makes, names.

A model file states the mathematics with the layers of modulm-layers; the `Builder` that its
modules are made with knows dtype, device, ranks, quantization, attention backend and the names of
the weights. The layers' names are found here too, where callers of release 0.1 have them.
"""

from typing import Any

from modulm.contracts.weight_names import Rewrite, WeightNames
from modulm.nn.builder import Builder, Parts, Shared
from modulm.nn.config import read_config
from modulm.nn.embedding import Embedding, Head
from modulm.nn.linear import Linear
from modulm.nn.norm import LayerNorm, Norm, RMSNorm
from modulm.plugins.moved import public_name

__all__ = [
    "Builder",
    "Embedding",
    "Head",
    "LayerNorm",
    "Linear",
    "Norm",
    "Parts",
    "RMSNorm",
    "Rewrite",
    "Shared",
    "WeightNames",
    "read_config",
]


def __getattr__(name: str) -> Any:
    return public_name("modulm_layers", name, __name__)
