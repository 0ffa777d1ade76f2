"""The pages that tools/reference.py writes from the code are current."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tool_reference", ROOT / "tools/reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli", "http-api", "metrics"])
def test_the_page_is_current(reference: ModuleType, name: str) -> None:
    written = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    assert written == reference.PAGES[name](), "run `python tools/reference.py`"


def test_generated_parts_are_current(reference: ModuleType) -> None:
    for page in reference.PARTS:
        written = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
        assert written == reference.filled(page), "run `python tools/reference.py`"


def test_they_have_what_is_there(reference: ModuleType) -> None:
    assert "| `--num-prompts` INTEGER |" in reference.cli_page()
    page = reference.http_page()
    assert "| `POST /v1/chat/completions` |" in page
    assert "| `temperature` | number, 0 to 2 |" in page
    assert "| `modulm:generation_tokens_total` | counter |" in reference.metrics_page()


def test_the_changelog_begins_with_this_version() -> None:
    import modulm

    text = (ROOT / "docs/changelog.md").read_text(encoding="utf-8")
    assert text.partition("\n## ")[2].startswith(modulm.__version__)
