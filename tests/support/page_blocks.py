"""The code blocks of the pages in docs/, and which of them tests run."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]
#: Languages of blocks that tests/unit/docs runs.
EXECUTED = frozenset({"bash", "python"})
_FENCE = re.compile(r"^[ \t]*```(\w*)\n(.*?)^[ \t]*```$", re.MULTILINE | re.DOTALL)


@frozen
class Block:
    """A code block of a page. hash: of its text, eight hexadecimal digits."""

    page: str
    language: str
    text: str

    @property
    def hash(self) -> str:
        return sha256(self.text.encode()).hexdigest()[:8]


def pages() -> dict[str, Path]:
    """The pages by name: those of docs/, the README and the page for contributors."""
    found = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return {path.stem: path for path in sorted(found)}


def blocks(page: str, path: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    return [Block(page, language, body) for language, body in _FENCE.findall(text)]


def shown_blocks(page: str, path: Path) -> list[Block]:
    """The blocks of a page that tests only show, in order."""
    return [block for block in blocks(page, path) if block.language not in EXECUTED]
