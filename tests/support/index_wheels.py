"""Small wheels of plugin packages, for indexes of packages."""

from __future__ import annotations

import zipfile
from pathlib import Path

POINTS = "[modulm.schedulers]\nlongest = modulm_longest:Policy\n"


def wheel(folder: Path, name: str, version: str, points: str, requires: str = "") -> Path:
    """Write a wheel with one module."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: A {name}\n"
    files = {
        f"{module}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": points,
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in [*files.items(), (f"{info}/RECORD", record)]:
            archive.writestr(inside, text)
    return path
