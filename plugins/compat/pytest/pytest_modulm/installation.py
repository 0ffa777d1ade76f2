"""Real distributions, written to a temporary folder that is on the path."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

from attrs import field, frozen

__all__ = ["Installation"]


@frozen(eq=False)
class Installation:
    """Installs distributions into `folder` by writing their metadata and modules.

    Calling it installs one:
    `install("modulm-foo", {"modulm.schedulers": {"a": "mod_a:A"}}, {"mod_a": source})`.
    """

    folder: Path
    _known: frozenset[str] = field(factory=lambda: frozenset(sys.modules))

    def __call__(
        self,
        name: str,
        entry_points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str],
        version: str = "1.0",
    ) -> Path:
        """Write a distribution; returns the folder.

        entry_points: group -> name -> "module:attribute". modules: path without suffix -> source.
        """
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        lines: list[str] = []
        for group, points in entry_points.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for module, source in modules.items():
            (self.folder / f"{module}.py").write_text(dedent(source), encoding="utf-8")
        return self.folder

    def forget(self) -> None:
        """Remove the modules that were imported from the folder."""
        for module in set(sys.modules) - self._known:
            if str(self.folder) in str(getattr(sys.modules[module], "__file__", "")):
                del sys.modules[module]
