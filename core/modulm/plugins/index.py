"""The packages of this project and their drivers, from `index.txt` (`tests/meta/test_index.py`).

Only these are suggested for installation: anybody could register a package that does not exist.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path

__all__ = ["install_hint", "is_first_party", "libraries", "normalized", "to_install"]


@cache
def normalized(name: str) -> str:
    """Normalize a distribution's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def _packages() -> Mapping[str, frozenset[str]]:
    """Return distribution -> its drivers as kind/name, or "library" for those under core/."""
    entries = (line.split() for line in _lines() if not line.startswith("+"))
    return {name: frozenset(offers) for name, *offers in entries}


@cache
def libraries() -> frozenset[str]:
    """Return the import packages of libraries, without the core."""
    return frozenset(
        name.replace("-", "_") for name, offers in _packages().items() if "library" in offers
    )


def _lines() -> list[str]:
    return re.findall(r"^[^#\n].*", Path(__file__).with_suffix(".txt").read_text("utf-8"), re.M)


def is_first_party(distribution: str) -> bool:
    """Whether a distribution belongs to this project."""
    return normalized(distribution) in _packages()


def to_install(requirement: str) -> str:
    """Return `: pip install NAME` for a package in the index, perhaps with extras, else ""."""
    name = normalized(requirement.partition("[")[0])
    if name not in _packages() and f"+{name}" not in _lines():
        return ""
    return f": pip install {shlex.quote(requirement)}"


def install_hint(kind: str, name: str) -> str:
    """Return `pip install modulm-foo` for a driver of this project's packages, else ""."""
    packages = (package for package, offers in _packages().items() if f"{kind}/{name}" in offers)
    return "".join(f"pip install {package}" for package in packages)
