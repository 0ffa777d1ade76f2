"""How many parameters a checkpoint has, as Ollama writes it."""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path

from modulm.errors import CheckpointError
from modulm_tensor_files import read_header

__all__ = ["parameter_size"]


@cache
def parameter_size(folder: str) -> str:
    """Return the size of a folder's safetensors files in parameters, such as "751.63M" or "8.0B".

    Empty where they are in other files, or several are packed into one integer.
    """
    path = Path(folder)
    files = sorted(path.glob("model*.safetensors")) or sorted(path.glob("*.safetensors"))
    try:
        tensors = [tensor for file in files for tensor in read_header(file)]
    except CheckpointError:
        return ""
    if any("int" in tensor.dtype and len(tensor.shape) > 1 for tensor in tensors):
        return ""
    count = sum(prod(tensor.shape) for tensor in tensors)
    for size, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if count >= size:
            return f"{count / size:.{digits}f}{letter}"
    return str(count) if count else ""
