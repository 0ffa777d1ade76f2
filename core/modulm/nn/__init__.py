"""Building blocks of models: the `Builder`, the modules that it creates, and weight slots.

A model file defines the computation with the layers of modulm-layers. The `Builder` provides dtype,
device, ranks, quantization, attention backend and weight names. The layers' names can be imported
from here as well, as in release 0.1.
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
