"""The code in the guides runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

GUIDES = (
    "../README",
    "chat-page",
    "chat-templates",
    "drivers",
    "embeddings",
    "examples",
    "media",
    "quantization",
    "sampling",
    "security",
    "vllm-scripts",
)


@pytest.mark.parametrize("page", GUIDES)
def test_guide(page: str, run_page: Callable[[str], None]) -> None:
    run_page(page)
