"""Links between pages, and the table of kinds."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_links_between_pages() -> None:
    for page in (*DOCS.glob("*.md"), *DOCS.parent.glob("*.md")):
        for target in re.findall(r"\]\(([\w./-]+\.md)\)", page.read_text()):
            assert (page.parent / target).is_file(), f"{page.name} links to {target}"


def test_every_group_is_in_the_table() -> None:
    from modulm.plugins.kinds import find_kind, kind_names

    text = (DOCS / "drivers.md").read_text()
    for kind in map(find_kind, kind_names()):
        assert f"`{kind.group}`" in text, kind.group
        if kind.contract is not None:
            path = kind.contract.removeprefix("modulm.").replace(":", ".")
            assert f"`{path}`" in text, path
