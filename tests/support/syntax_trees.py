"""Syntax trees of the core's modules, which several tests read; parsing all of them takes 3 s."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

__all__ = ["syntax_tree"]


@cache
def syntax_tree(path: Path) -> ast.Module:
    """The tree of a module. It is shared, and must not be changed."""
    return ast.parse(path.read_text(encoding="utf-8"))
