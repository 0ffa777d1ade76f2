"""The keywords of LLM, as editors and type checkers see them; run as a script it writes them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from modulm import LLM, SamplingParams
from modulm.config.schema.catalog import catalog
from modulm.contracts.flags import Flag, Kind
from modulm.errors import ConfigError
from modulm_frontend.keywords import LLMFlags

FILE = Path(__file__).resolve().parents[2] / "core/serving/frontend/modulm_frontend/keywords.py"
#: Whose flags are written down: the core's, and those of libraries beside it.
OWN = ("", "modulm-adapters", "modulm-media", "modulm-speculation")
HEAD = '''"""The keywords of `LLM(...)`, for editors and type checkers.

Written by `python tests/frontend/test_keywords.py` from the flags of the core and of the libraries
beside it that an engine of one's own has. Flags of other packages are keywords too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

__all__ = ["LLMFlags"]


class LLMFlags(TypedDict, total=False):
    """Every keyword is optional; what it means is in docs/config.md."""

'''


def spelt(kind: Any) -> str:
    """A type as a keyword may be given; lists and tables also as text, as on the command line."""
    if isinstance(kind, UnionType):
        return " | ".join(spelt(part) for part in get_args(kind))
    match get_origin(kind):
        case None:
            return "None" if kind is type(None) else "Any" if kind is Any else str(kind.__name__)
        case origin if origin is tuple:
            return f"Sequence[{spelt(get_args(kind)[0])}] | str"
        case origin if origin is Mapping:
            return "Mapping[str, Any] | str"
    return "Any"


def typed(spec: Flag) -> str:
    """The annotation of a flag: its choices, its type, or text where text is parsed."""
    if spec.choices and spec.kind is None and spec.kinds == (str,):
        choices = ", ".join(f'"{word}"' for word in spec.choices)
        return f"Literal[{choices}]" + (" | None" if spec.optional else "")
    parts = dict.fromkeys(spelt(spec.type).split(" | "))
    if "Any" in parts:
        return "Any"
    if spec.parse is not None:
        parts["str"] = None
    return " | ".join([*(part for part in parts if part != "None"), *(["None"] * spec.optional)])


def written() -> str:
    groups = [g for g in catalog().groups if not g.cls.server and g.origin in OWN]
    specs = [spec for group in groups for spec in group.flags]
    works = [s for s in specs if not s.nested and s.state.kind in (Kind.WORKS, Kind.RENAMED)]
    lines = [f"    {s.name}: {typed(s)}\n" for s in works if s.name != "model"]
    return HEAD + "".join(sorted(lines))


def test_the_keywords_are_current() -> None:
    names = [line.split(":")[0].strip() for line in written().splitlines() if line[:4] == "    "]
    known = get_type_hints(LLMFlags)
    assert known.keys() == {name for name in names if name.isidentifier()}, (
        "run `python tests/frontend/test_keywords.py`"
    )


def test_a_keyword_has_the_values_of_its_flag() -> None:
    hints = get_type_hints(LLMFlags)
    assert hints["block_size"] == int | None
    assert set(get_args(hints["runner"])) >= {"auto", "generate", "pooling"}
    assert get_origin(hints["runner"]) is Literal


def test_a_misspelt_keyword_is_told_what_it_may_have_meant() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM("demo", max_model_lenght=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no field 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="multiple values|positional"):
        SamplingParams(1)  # type: ignore[misc]


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
    sys.exit(subprocess.run([sys.executable, "-m", "ruff", "format", FILE], check=False).returncode)
