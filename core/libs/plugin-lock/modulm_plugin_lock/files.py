"""The files of an installed distribution, and one digest of them.

The digest is of contents and of paths below site-packages. It does not depend on the installer, the
folder of the environment, compiled bytecode, or whether the installation is editable.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path

__all__ = ["files_digest", "is_editable"]


def is_editable(distribution: Distribution) -> bool:
    """Whether the distribution is an editable installation."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable"))


def files_digest(distribution: Distribution, name: str) -> str:
    """Return the sha256, in hex, of the distribution's modules and data. Imports nothing.

    Includes modules in its folders that it did not install. name: as in its metadata.
    """
    whole = hashlib.sha256()
    for path, file in sorted(_files(distribution, name)):
        content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "missing"
        whole.update(f"{path}\0{content}\n".encode())
    return whole.hexdigest()


def _files(distribution: Distribution, name: str) -> set[tuple[str, Path]]:
    """Return (path below site-packages, file) of all files that count."""
    if is_editable(distribution) or distribution.read_text("RECORD") is None:
        return set(_found_by_import(distribution, name))
    files = {}
    for listed in distribution.files or ():
        inside = (
            not listed.parts[0].endswith((".dist-info", ".egg-info")) and ".." not in listed.parts
        )
        if inside and "__pycache__" not in listed.parts:
            files[str(listed)] = Path(str(listed.locate()))
    folders = {path.rpartition("/")[0]: file.parent for path, file in files.items() if "/" in path}
    for prefix, folder in folders.items():
        files |= {f"{prefix}/{file.name}": file for file in folder.glob("*.py")}
    return set(files.items())


def _found_by_import(distribution: Distribution, name: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of the packages and modules that entry points name, or the distribution."""
    targets = {p.value.partition(":")[0].partition(".")[0] for p in distribution.entry_points}
    for package in targets | {name.replace("-", "_")}:
        spec = find_spec(package)
        if spec is None:
            continue
        if spec.submodule_search_locations is None:
            if spec.origin is not None:
                yield Path(spec.origin).name, Path(spec.origin)
            continue
        for folder in map(Path, spec.submodule_search_locations):
            for file in folder.rglob("*"):
                if file.is_file() and "__pycache__" not in file.parts:
                    yield f"{package}/{file.relative_to(folder).as_posix()}", file
