"""The code in the pages on writing plugins runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from samples import parametrize_sample

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = ("write-a-plugin", *sorted(path.stem for path in DOCS.glob("plugins-*.md")))


@parametrize_sample("page", PAGES, every=9)
def test_page(page: str, run_page: Callable[[str], None]) -> None:
    if page == "plugins-kernels":
        pytest.importorskip("triton", reason="no Triton: make setup installs it on Linux")
    run_page(page)
