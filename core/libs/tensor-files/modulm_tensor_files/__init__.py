"""Building blocks of loaders: files of tensors, single or sharded with an index.

Names are loaded on first use: most need torch, and commands that only name files do not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    **dict.fromkeys(("copy_beside", "replace"), "beside"),
    **dict.fromkeys(("PickledFolder", "read_tensors"), "pickles"),
    **dict.fromkeys(("SafetensorsFolder", "read_header"), "safetensors"),
    **dict.fromkeys(("RANK_PATTERN", "rank_files", "unfit_pattern"), "shards"),
    "TensorFolder": "folder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
