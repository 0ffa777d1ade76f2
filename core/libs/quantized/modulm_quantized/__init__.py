"""Building blocks of packages that read quantized checkpoints.

A format defines the tensors of a layer and converts them to `Codes`. `CodedMethod` stores codes in
the platform's kernel format, multiplies with them and dequantizes them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulm_quantized.activations import (
        ACTIVATION_FORMATS,
        ActivationFormat,
        exact_product,
        round_activations,
        rounding_bound,
    )
    from modulm_quantized.at_load import AtLoad, AtLoadConfig, ReadOrRound, ReadOrRoundConfig
    from modulm_quantized.codes import CodedExperts, Codes
    from modulm_quantized.experts import pack_stack
    from modulm_quantized.fitting import Fitted
    from modulm_quantized.method import ACTIVATIONS, CodedMethod
    from modulm_quantized.names import below, matches
    from modulm_quantized.order import sorted_by_group
    from modulm_quantized.published import Covers, native_lists, native_patterns, renamed_layers
    from modulm_quantized.rounding import SCHEMES, Scheme, round_weight
    from modulm_quantized.scales import block_columns, block_grid, exponents, narrowest, per_row
    from modulm_quantized.stored import StoredAs
    from modulm_quantized.words import E2M1, nibbles, pack_words, packed_axis, unpack_words

__all__ = [
    "ACTIVATIONS",
    "ACTIVATION_FORMATS",
    "E2M1",
    "SCHEMES",
    "ActivationFormat",
    "AtLoad",
    "AtLoadConfig",
    "CodedExperts",
    "CodedMethod",
    "Codes",
    "Covers",
    "Fitted",
    "ReadOrRound",
    "ReadOrRoundConfig",
    "Scheme",
    "StoredAs",
    "below",
    "block_columns",
    "block_grid",
    "exact_product",
    "exponents",
    "matches",
    "narrowest",
    "native_lists",
    "native_patterns",
    "nibbles",
    "pack_stack",
    "pack_words",
    "packed_axis",
    "per_row",
    "renamed_layers",
    "round_activations",
    "round_weight",
    "rounding_bound",
    "sorted_by_group",
    "unpack_words",
]

#: Names and the modules that they are imported from on first use: flags are read without torch.
_HOMES = {
    "ACTIVATIONS": "method",
    "ACTIVATION_FORMATS": "activations",
    "E2M1": "words",
    "SCHEMES": "rounding",
    "ActivationFormat": "activations",
    "AtLoad": "at_load",
    "AtLoadConfig": "at_load",
    "CodedExperts": "codes",
    "CodedMethod": "method",
    "Codes": "codes",
    "Covers": "published",
    "Fitted": "fitting",
    "ReadOrRound": "at_load",
    "ReadOrRoundConfig": "at_load",
    "Scheme": "rounding",
    "StoredAs": "stored",
    "below": "names",
    "block_columns": "scales",
    "block_grid": "scales",
    "exact_product": "activations",
    "exponents": "scales",
    "matches": "names",
    "narrowest": "scales",
    "native_lists": "published",
    "native_patterns": "published",
    "nibbles": "words",
    "pack_stack": "experts",
    "pack_words": "words",
    "packed_axis": "words",
    "per_row": "scales",
    "round_activations": "activations",
    "renamed_layers": "published",
    "round_weight": "rounding",
    "rounding_bound": "activations",
    "sorted_by_group": "order",
    "unpack_words": "words",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
