"""Building blocks of packages that read quantized checkpoints.

A format defines the tensors of a layer and converts them to `Codes`. `CodedMethod` stores codes in
the platform's kernel format, multiplies with them and dequantizes them.
"""

from modulm_quantized.at_load import AtLoad, AtLoadConfig, ReadOrRound, ReadOrRoundConfig
from modulm_quantized.codes import CodedExperts, Codes
from modulm_quantized.experts import pack_stack
from modulm_quantized.fitting import Fitted
from modulm_quantized.method import ACTIVATIONS, CodedMethod
from modulm_quantized.names import below, matches
from modulm_quantized.order import sorted_by_group
from modulm_quantized.rounding import SCHEMES, Scheme, round_weight
from modulm_quantized.scales import block_columns, block_grid, exponents, narrowest, per_row
from modulm_quantized.stored import StoredAs
from modulm_quantized.words import E2M1, nibbles, pack_words, packed_axis, unpack_words

__all__ = [
    "ACTIVATIONS",
    "E2M1",
    "SCHEMES",
    "AtLoad",
    "AtLoadConfig",
    "CodedExperts",
    "CodedMethod",
    "Codes",
    "Fitted",
    "ReadOrRound",
    "ReadOrRoundConfig",
    "Scheme",
    "StoredAs",
    "below",
    "block_columns",
    "block_grid",
    "exponents",
    "matches",
    "narrowest",
    "nibbles",
    "pack_stack",
    "pack_words",
    "packed_axis",
    "per_row",
    "round_weight",
    "sorted_by_group",
    "unpack_words",
]
