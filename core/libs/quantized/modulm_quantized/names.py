"""Which layers a checkpoint's settings mean."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["below", "matches"]


def below(name: str, paths: Iterable[str]) -> bool:
    """Whether `name` is one of the modules at `paths`, lies in one, or has one in its path.

    A path may be whole ("lm_head", "model.layers.0") or a part of paths ("mlp.gate").
    """
    dotted = f".{name}."
    return any(f".{path.strip('.')}." in dotted for path in paths)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns names the layer: a regular expression behind "re:", the whole
    path, or its end."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif name == pattern or name.endswith(f".{pattern}"):
            return True
    return False
