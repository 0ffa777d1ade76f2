"""The code in the guides runs."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

from samples import parametrize_sample

DOCS = Path(__file__).resolve().parents[3] / "docs"
#: Run by test_plugin_pages.py and test_publish_page.py.
_OTHERS = ("write-a-plugin", "plugins-", "publish-a-plugin")
GUIDES = [
    page
    for page in ("../README", *sorted(path.stem for path in DOCS.glob("*.md")))
    if re.search(r"^```(python|bash)$", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.M)
    and not page.startswith(_OTHERS)
]


@parametrize_sample("page", GUIDES, every=8)
def test_guide(page: str, run_page: Callable[[str], None]) -> None:
    run_page(page)


def test_guides_are_found() -> None:
    assert {"../README", "examples", "install", "from-vllm", "reasoning"} <= set(GUIDES)


def test_the_table_of_large_machines_is_the_scripts() -> None:
    script = runpy.run_path(str(DOCS.parent / "bench" / "many_cores.py"))
    assert "\n".join(script["table"]()) in (DOCS / "many-cores.md").read_text(encoding="utf-8")
