"""Names of files that belong to one rank each."""

from __future__ import annotations

import re

__all__ = ["RANK_PATTERN", "rank_files", "unfit_pattern"]

#: As vLLM calls them. `{ranks}`, how many there are, may be in a pattern too.
RANK_PATTERN = "model-rank-{rank}-part-{part}.safetensors"


def unfit_pattern(pattern: str) -> str | None:
    """Why files cannot be called so."""
    names = re.findall(r"{([^}]*)}", pattern)
    known = {"rank", "part"} <= set(names) <= {"rank", "part", "ranks"}
    plain = not re.search(r"[{}/]", re.sub(r"{\w*}", "", pattern))
    if known and plain and pattern.endswith(".safetensors"):
        return None
    return f"{pattern!r}: a name with {{rank}} and {{part}} that ends in .safetensors is needed"


def rank_files(pattern: str, rank: int, ranks: int) -> re.Pattern[str]:
    """What the names of a rank's files fit; group 1 is the part."""
    text = re.escape(pattern)
    for word, value in (("rank", str(rank)), ("ranks", str(ranks)), ("part", r"(\d+)")):
        text = text.replace(re.escape(f"{{{word}}}"), value)
    return re.compile(text)
