"""Where compiled kernels are kept: a folder for each set of versions that makes them.

Triton keeps what it compiled under a hash of the source and of everything else that it depends
on. A folder by version can be filled ahead (`ahead.py`), shipped with an image, and thrown away as
a whole after an upgrade.
"""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path

import torch

from modulm.config.environ import variables
from modulm_kernels_triton.device import interpreting, version

__all__ = ["folder", "keep_compiled"]


def folder() -> Path:
    """The folder of these versions; TRITON_CACHE_DIR names another place for all of them."""
    own = version_of("modulm-kernels-triton")
    versions = f"modulm-{own}-triton-{version()}-torch-{torch.__version__}"
    home = variables().get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "modulm" / "triton" / versions


def keep_compiled() -> None:
    """Have Triton keep what it compiles in `folder`, unless it was told where."""
    from triton import knobs

    if not interpreting() and "TRITON_CACHE_DIR" not in variables():
        knobs.cache.dir = str(folder())
