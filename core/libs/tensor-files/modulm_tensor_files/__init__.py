"""Building blocks of loaders: files of tensors, single or sharded with an index."""

from modulm_tensor_files.beside import copy_beside, replace
from modulm_tensor_files.folder import TensorFolder
from modulm_tensor_files.pickles import PickledFolder, read_tensors
from modulm_tensor_files.safetensors import SafetensorsFolder, read_header
from modulm_tensor_files.shards import RANK_PATTERN, rank_files, unfit_pattern

__all__ = [
    "RANK_PATTERN",
    "PickledFolder",
    "SafetensorsFolder",
    "TensorFolder",
    "copy_beside",
    "rank_files",
    "read_header",
    "read_tensors",
    "replace",
    "unfit_pattern",
]
