"""Checks whether an installed distribution was altered, by its RECORD, without importing it.

RECORD has a digest of each file (https://packaging.python.org/specifications/recording-installed-packages);
its own digest stands for the whole. An editable installation records only what points to a folder.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

__all__ = ["altered_files", "record_digest"]


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except (PackageNotFoundError, ValueError):
        return None


@cache
def record_digest(name: str) -> str | None:
    """Return the sha256 of a distribution's RECORD in hex, or None if it has none."""
    distribution = _distribution(name)
    text = None if distribution is None else distribution.read_text("RECORD")
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


@cache
def altered_files(name: str) -> tuple[str, ...]:
    """Return missing and modified files, and modules that RECORD does not list."""
    distribution = _distribution(name)
    listed = [] if distribution is None else distribution.files or []
    wrong, there, folders = [], set(), set()
    for file in listed:
        path = Path(str(file.locate()))
        there.add(path)
        if file.suffix == ".py" and len(file.parts) > 1:
            folders.add(path.parent)
        if file.hash is None:  # RECORD itself, and what is compiled later
            continue
        digest = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.is_file() else b""
        if base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value:
            wrong.append(str(file))
    added = {path for folder in folders for path in folder.glob("*.py")} - there
    return (*wrong, *sorted(map(str, added)))
