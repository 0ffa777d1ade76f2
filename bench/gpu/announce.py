"""Write metadata of this repository's packages, for a Python in which none is installed.

    python bench/gpu/announce.py REPOSITORY FOLDER

FOLDER gets a `.dist-info` for each distribution, and `paths`: the folders with their code.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

__all__ = ["announce"]

_WHERE = ("pyproject.toml", "core/*/*/pyproject.toml", "plugins/*/*/pyproject.toml")
_KERNELS = "kernels/triton/pyproject.toml"


def announce(root: Path, folder: Path) -> list[Path]:
    """Write the metadata; returns the folders for Python's path."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for pattern in (*_WHERE, _KERNELS):
        for file in sorted(root.glob(pattern)):
            project = tomllib.loads(file.read_text())["project"]
            name = project["name"].replace("-", "_")
            info = folder / f"{name}-{project['version']}.dist-info"
            info.mkdir(exist_ok=True)
            about = f"Metadata-Version: 2.1\nName: {project['name']}\n"
            (info / "METADATA").write_text(f"{about}Version: {project['version']}\n")
            lines = []
            for group, points in project.get("entry-points", {}).items():
                lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""]
            (info / "entry_points.txt").write_text("\n".join(lines))
            paths.append(root / "core" if file.parent == root else file.parent)
    (folder / "paths").write_text(":".join(map(str, paths)))
    return paths


if __name__ == "__main__":
    announce(Path(sys.argv[1]), Path(sys.argv[2]))
