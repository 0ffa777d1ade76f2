"""Read JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modulm.errors import CheckpointError

__all__ = ["read_file", "read_object"]


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError."""
    value: dict[str, Any] = read_file(file, dict)
    return value


def read_file(file: Path, kind: type) -> Any:
    """Read a JSON value of type `kind`. Raises CheckpointError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{file}: a JSON {kind.__name__} is required")
    return value
