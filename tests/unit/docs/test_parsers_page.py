"""docs/parsers.md lists every parser that the packages here offer, and what tells its format.

`python tests/unit/docs/test_parsers_page.py` writes the tables.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/parsers.md"
MARK = "<!-- written by tests/unit/docs/test_parsers_page.py -->\n"
TITLES = {"tool_parsers": "Tool parsers", "reasoning_parsers": "Reasoning parsers"}


def code(text: str) -> str:
    fence = "`` {} ``" if "`" in text else "`{}`"
    return fence.format(text).replace("|", "\\|")


def told_by(fit: dict[str, Any]) -> str:
    """A cell: what is looked for."""
    parts = [" ".join(map(code, fit.get("marks", ())))]
    conditions = [*fit.get("any", ())]
    if conditions:
        parts.append(("with " if fit.get("marks") else "") + " or ".join(map(code, conditions)))
    if fit.get("shared") and not conditions:
        parts.append("of the models " + ", ".join(map(code, fit["models"])))
    if fit.get("settings"):
        parts.append("the checkpoint's " + ", ".join(map(code, fit["settings"])))
    return ", ".join(part for part in parts if part) or "by name only"


def rows(kind: str) -> list[tuple[str, str, str]]:
    """(name, family, what is looked for), by name."""
    table = []
    for file in (ROOT / "plugins/parsers").glob("*/pyproject.toml"):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        (package,) = file.parent.glob("modulm_parser_*")
        source = (package / "__init__.py").read_text(encoding="utf-8")
        family = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].rstrip(".")
        fits = tomllib.loads((package / "fits.toml").read_text(encoding="utf-8")).get(kind, {})
        for name in project["entry-points"].get(f"modulm.{kind}", ()):
            detection = told_by(fits[name]) if name in fits else "by name only"
            table.append((name, family, detection))
    return sorted(table)


def tables() -> str:
    text = ""
    for kind, title in TITLES.items():
        text += f"\n## {title}\n\n| name | format | detected by |\n|---|---|---|\n"
        text += "".join(
            f"| `{name}` | {family.replace('|', chr(92) + '|')} | {detection} |\n"
            for name, family, detection in rows(kind)
        )
    return text


def test_the_page_is_current() -> None:
    _, mark, written = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark
    assert written == tables(), "run `python tests/unit/docs/test_parsers_page.py`"


if __name__ == "__main__":
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(head + MARK + tables(), encoding="utf-8")
