"""The contract reference is generated, and each version of a contract says what changed."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import contract_pages  # noqa: E402


def test_the_pages_are_up_to_date() -> None:
    expected = contract_pages.pages()
    stale = [
        path.name
        for path, text in expected.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    stale += [p.name for p in contract_pages.PAGES.glob("*.md") if p not in expected]
    assert not stale, f"run python tools/contract_pages.py: {', '.join(stale)}"


def test_each_new_version_of_a_contract_says_what_changed() -> None:
    changes = contract_pages.changes()
    versions = {
        kind: contract_pages.version_of(file)
        for kind, (_, file, _) in contract_pages.contracts().items()
    }
    missing = [
        f"{kind} {version}"
        for kind, current in versions.items()
        for version in range(2, current + 1)
        if not changes.get(kind, {}).get(version)
    ]
    assert not missing, f"add what changed to tools/contract_changes.toml: {', '.join(missing)}"
    unknown = [
        f"{kind} {version}"
        for kind, texts in changes.items()
        for version in texts
        if not 2 <= version <= versions.get(kind, 0)
    ]
    assert not unknown, f"tools/contract_changes.toml has versions that are not: {unknown}"
