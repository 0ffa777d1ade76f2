"""The packages of this project and what they offer, from `index.txt` (`tests/meta/test_index.py`).

Only these are suggested for installation. A package that does not exist could be registered by
anybody who reads the suggestion.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path

__all__ = ["install_hint", "is_first_party", "libraries", "normalized", "to_install"]


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def _packages() -> Mapping[str, frozenset[str]]:
    """Distribution -> what it offers, each as kind/name; "library" for one under core/."""
    entries = (line.split() for line in _lines() if not line.startswith("+"))
    return {name: frozenset(offers) for name, *offers in entries}


@cache
def libraries() -> frozenset[str]:
    """Import packages of the distributions that others are written with, the core apart."""
    return frozenset(
        name.replace("-", "_") for name, offers in _packages().items() if "library" in offers
    )


def _lines() -> list[str]:
    lines = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def is_first_party(distribution: str) -> bool:
    """Whether a distribution is one of this project's."""
    return normalized(distribution) in _packages()


def to_install(requirement: str) -> str:
    """`: pip install NAME` for a package in the index, perhaps with extras, else nothing."""
    name = normalized(requirement.partition("[")[0])
    if name not in _packages() and f"+{name}" not in _lines():
        return ""
    return f": pip install {shlex.quote(requirement)}"


def install_hint(kind: str, name: str) -> str:
    """`pip install modulm-foo` for a name that a package of this project offers, else nothing."""
    homes = (home for home, offers in _packages().items() if f"{kind}/{name}" in offers)
    return "".join(f"pip install {home}" for home in homes)
