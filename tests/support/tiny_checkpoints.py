"""Tiny checkpoints of tests, written once per session and copied for each test that wants the same.

`make_tiny` is replaced before test modules import it. Workers of pytest-xdist share the folder; a
checkpoint is named by the hash of all that decides its content.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from modulm.testing import checkpoints

_write = checkpoints.make_tiny


def share(folder: Path) -> None:
    """Keep checkpoints in `folder` from now on."""

    def make_tiny(path: str | Path, architecture: str = "LlamaForCausalLM", **options: Any) -> Path:
        made_of = repr((architecture, checkpoints._shape(architecture), sorted(options.items())))
        kept = folder / hashlib.sha256(made_of.encode()).hexdigest()
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=folder) as begun:
                written = _write(Path(begun) / "checkpoint", architecture, **options)
                with suppress(OSError):  # another worker was faster
                    os.rename(written, kept)
        return Path(shutil.copytree(kept, path, dirs_exist_ok=True))

    make_tiny.__doc__ = _write.__doc__
    checkpoints.make_tiny = make_tiny
