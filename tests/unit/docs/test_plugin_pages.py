"""The code in the pages on writing plugins runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = ("write-a-plugin", *sorted(path.stem for path in DOCS.glob("plugins-*.md")))


@pytest.mark.parametrize("page", PAGES)
def test_page(page: str, run_page: Callable[[str], None]) -> None:
    if page == "plugins-kernels":
        pytest.importorskip("triton", reason="no Triton: make setup installs it on Linux")
    run_page(page)
