"""Names of files that belong to one rank each."""

from __future__ import annotations

import re

__all__ = ["RANK_PATTERN", "rank_files", "unfit_pattern"]

#: vLLM's default pattern. A pattern may also contain `{ranks}`, the number of ranks.
RANK_PATTERN = "model-rank-{rank}-part-{part}.safetensors"


def unfit_pattern(pattern: str) -> str | None:
    """Return why a pattern is not valid for file names, None if it is."""
    names = re.findall(r"{([^}]*)}", pattern)
    known = {"rank", "part"} <= set(names) <= {"rank", "part", "ranks"}
    plain = not re.search(r"[{}/]", re.sub(r"{\w*}", "", pattern))
    if known and plain and pattern.endswith(".safetensors"):
        return None
    return f"{pattern!r}: a name with {{rank}} and {{part}} ending in .safetensors is expected"


def rank_files(pattern: str, rank: int, ranks: int) -> re.Pattern[str]:
    """Return a regular expression for the file names of a rank; group 1 is the part."""
    text = re.escape(pattern)
    for word, value in (("rank", str(rank)), ("ranks", str(ranks)), ("part", r"(\d+)")):
        text = text.replace(re.escape(f"{{{word}}}"), value)
    return re.compile(text)
