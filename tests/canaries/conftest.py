"""Packages beside this file, as if they were installed."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from modulm.plugins import PluginManager
from modulm.plugins.manager import using

CANARIES = Path(__file__).parent


def write_metadata(canary: str, site: Path) -> None:
    """Metadata of a canary's distribution, as an installer makes it of pyproject.toml."""
    project = tomllib.loads((CANARIES / canary / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(head)
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def install() -> Callable[[str, Path], None]:
    """Writes the metadata of a canary's distribution into a folder of sys.path."""
    return write_metadata


@pytest.fixture(scope="session")
def installed() -> Callable[[str, Path], AbstractContextManager[PluginManager]]:
    """Has a canary installed for a while, for the processes that are started meanwhile too."""

    @contextmanager
    def installed(canary: str, site: Path) -> Iterator[PluginManager]:
        write_metadata(canary, site)
        folders = (str(site), str(CANARIES / canary))
        before = os.environ.get("PYTHONPATH", "")
        with pytest.MonkeyPatch.context() as patch:
            for folder in folders:
                patch.syspath_prepend(folder)
            patch.setenv("PYTHONPATH", os.pathsep.join((*folders, before)))
            known = set(sys.modules)
            with using(PluginManager()) as manager:
                yield manager
            for name in set(sys.modules) - known:
                if "canary" in name:
                    del sys.modules[name]

    return installed
