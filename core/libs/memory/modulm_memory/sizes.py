"""Sizes in bytes as text."""

from __future__ import annotations

import re

from modulm.contracts.platform import Memory
from modulm.errors import ConfigError

__all__ = ["parse_memory", "size"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Format a number of bytes: "512 B", "1.5 GiB"."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def parse_memory(text: str | None) -> Memory | None:
    """Parse a size such as "24GiB" or "24GB". Raises ConfigError."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9.]+) *([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError("device_memory", f"{text!r} is not a size such as 24GiB")
    unit = (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    count = int(float(match[1]) * base ** (" kmgt".index(unit[:1] or " ")))
    return Memory(total=count, free=count)
