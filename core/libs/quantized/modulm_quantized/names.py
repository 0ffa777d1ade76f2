"""Match layer names against a checkpoint's settings."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["below", "matches"]


def below(name: str, paths: Iterable[str]) -> bool:
    """Whether `name` is one of the modules at `paths`, is inside one, or contains one in its path.

    A path may be complete ("lm_head", "model.layers.0") or partial ("mlp.gate").
    """
    dotted = f".{name}."
    return any(f".{path.strip('.')}." in dotted for path in paths)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the layer.

    A pattern is a regular expression after "re:", a complete path, or the end of a path.
    """
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif name == pattern or name.endswith(f".{pattern}"):
            return True
    return False
