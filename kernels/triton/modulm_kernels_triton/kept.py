"""The folder of compiled kernels: one per combination of versions.

Triton stores compiled kernels under a hash of the source and of everything else that they depend
on. A folder per version can be filled ahead of time (`ahead.py`), shipped with an image, and
deleted as a whole after an upgrade.
"""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path

import torch

from modulm.config.environ import variables
from modulm_kernels_triton.device import interpreting, version

__all__ = ["folder", "keep_compiled"]


def folder() -> Path:
    """Return the folder for the installed versions; TRITON_CACHE_DIR overrides it."""
    kernels_version = version_of("modulm-kernels-triton")
    versions = f"modulm-{kernels_version}-triton-{version()}-torch-{torch.__version__}"
    home = variables().get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "modulm" / "triton" / versions


def keep_compiled() -> None:
    """Make Triton store compiled kernels in `folder`, unless TRITON_CACHE_DIR is set."""
    from triton import knobs

    if not interpreting() and "TRITON_CACHE_DIR" not in variables():
        knobs.cache.dir = str(folder())
