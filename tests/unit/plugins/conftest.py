"""Real distributions, made in a temporary folder that is put on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

Install = Callable[..., Path]

DRIVER = """
    from modulm.contracts.policy import Policy

    class Shortest(Policy):
        name = "shortest"
        api = 1

        def key(self, request):
            return request.prompt_len

        def victim(self, running):
            return 0
"""


@pytest.fixture
def driver() -> str:
    """Source of a module with a complete scheduling policy `Shortest`."""
    return DRIVER


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install("modulm-foo", {"modulm.schedulers": {"a": "mod_a:A"}}, {"mod_a": source})`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def make(
        name: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str],
        version: str = "1.0",
    ) -> Path:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for group, points in entry_points.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(dedent(source))
        return tmp_path

    yield make
    for module in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]
