"""Conversions of a checkpoint that peers read, made once and kept in a folder.

Imports only the standard library, like cases.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

#: Environment variable with the folder; `compare.py --conversions` sets it.
FOLDER = "BENCH_CONVERSIONS"


def converted(checkpoint: str, engine: str, weights: str, convert: Callable[[str], None]) -> str:
    """Return the folder of a conversion. convert: writes it to the path that it is called with.

    A conversion that was interrupted is made again: the folder gets its name when it is complete.
    """
    source = Path(checkpoint)
    parent = Path(os.environ.get(FOLDER) or source.parent / "conversions")
    folder = parent / f"{source.name}-{engine}-{weights}"
    if not folder.exists():
        unfinished = folder.with_name(folder.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        convert(str(unfinished))
        unfinished.rename(folder)
    return str(folder)
