"""Reasons why neither packages nor transformers support an architecture (`unsupported.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources

__all__ = ["reasons"]


@cache
def reasons() -> Mapping[str, str]:
    """Architecture -> the reason why it is rejected."""
    file = resources.files("modulm_transformers") / "unsupported.toml"
    groups = tomllib.loads(file.read_text("utf-8"))["group"]
    return {name: group["reason"] for group in groups for name in group["names"]}
