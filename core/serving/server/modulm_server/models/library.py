"""The models of `--models-dir`: finds them, and with --models-dir-writable adds and removes them.

A model is a folder with a checkpoint, a GGUF file, a repository in the form of the Hugging Face
cache, or a folder with `modulm.yaml`: some of the settings of `--models-config`, in which values
that begin with `./` are paths in the folder.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from modulm.errors import ConfigError, PluginNotFound
from modulm.plugins import manager

__all__ = ["SETTINGS_FILE", "ModelLibrary", "hub_id", "is_model_name", "link"]

#: Settings of a model, in its folder.
SETTINGS_FILE = "modulm.yaml"
#: What that may set: nothing that could run code, as the folder may come from others.
_SETTINGS = (
    "model", "adapter", "system-prompt", "default-stop", "override-generation-config",
    "max-model-len", "seed", "quantization", "chat-template", "chat-template-content-format",
)  # fmt: skip
_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})?(:{_PART})?")
_LONGEST_NAME = 256
_CACHED = "models--"


def is_model_name(name: str) -> bool:
    """Whether a model of a library may have this name: NAME or OWNER/NAME, either with :TAG."""
    parts = len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) and ".." not in name
    return bool(parts) and not name.startswith(_CACHED)


def hub_id(name: str) -> str | None:
    """The hub id that a package gives a short name; None for other names."""
    if "/" in name or not is_model_name(name):
        return None
    try:
        source = manager.current().load("checkpoints", name).source()
    except PluginNotFound:
        return None
    return source if isinstance(source, str) else None


class ModelLibrary:
    """The models in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def models(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Name and settings of each model. Raises ConfigError."""
        if not self.folder.is_dir():
            raise ConfigError("models_dir", f"{self.folder} is not a folder")
        for name, path in self._paths():
            yield name, self._settings(path)

    def find(self, name: str) -> Path | None:
        """The folder or file of a model; of a repository in the cache, the latest commit's."""
        return next((path for one, path in self._paths() if one == name), None)

    def settings(self, name: str) -> Mapping[str, Any] | None:
        """The settings of a model; None if the folder does not have it. Raises ConfigError."""
        path = self.find(name)
        return None if path is None else self._settings(path)

    def _paths(self) -> Iterator[tuple[str, Path]]:
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith("."):
                continue
            if path.suffix == ".gguf" and path.is_file():
                yield path.stem, path
            elif _is_model(path):
                yield path.name, path
            elif path.name.startswith(_CACHED) and (path / "refs" / "main").is_file():
                revision = (path / "refs" / "main").read_text(encoding="utf-8").strip()
                snapshot = path / "snapshots" / revision
                if (snapshot / "config.json").is_file():
                    yield path.name.removeprefix(_CACHED).replace("--", "/", 1), snapshot
            elif path.is_dir():
                for inner in sorted(path.iterdir()):
                    if _is_model(inner):
                        yield f"{path.name}/{inner.name}", inner

    def _settings(self, path: Path) -> Mapping[str, Any]:
        file = path / SETTINGS_FILE
        if not file.is_file():
            return {"model": str(path)}
        try:
            table = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError("models_dir", f"{file} cannot be read: {reason}") from error
        if not isinstance(table, dict):
            raise ConfigError("models_dir", f"{file} must be a table of settings")
        if unknown := sorted(str(key) for key in table if key not in _SETTINGS):
            allowed = ", ".join(_SETTINGS)
            raise ConfigError(
                "models_dir",
                f"{file}: {unknown[0]} is not one of {allowed}; --models-config has other flags",
            )
        return {key: _resolved(value, path) for key, value in table.items()}

    # Changes.

    def add(self, name: str, settings: Mapping[str, Any], fill: Callable[[Path], None]) -> None:
        """Add a model, or replace one of this name. fill: puts its files into a new folder."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            fill(new)
            text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
            (new / SETTINGS_FILE).write_text(text, encoding="utf-8")
            new.chmod(0o755)
            old = self._set_aside(target) if target.exists() else None
            try:
                new.rename(target)
            except BaseException:
                if old is not None:
                    old.rename(target)
                    old.parent.rmdir()
                raise
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        if old is not None:
            shutil.rmtree(old.parent, ignore_errors=True)

    def copy_files(self, name: str, target: Path) -> dict[str, Any]:
        """Put the files of a model into a folder, without using more of the disk if the file system
        has hard links; returns its settings there. Raises KeyError.
        """
        path = self.find(name)
        if path is None:
            raise KeyError(name)
        if path.is_file():
            link(path, target / path.name)
            return {"model": f"./{path.name}"}
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.name != SETTINGS_FILE:
                place = target / file.relative_to(path)
                place.parent.mkdir(parents=True, exist_ok=True)
                link(file.resolve(), place)
        if not (path / SETTINGS_FILE).is_file():
            return {"model": "./"}
        table: dict[str, Any] = yaml.safe_load((path / SETTINGS_FILE).read_text(encoding="utf-8"))
        return table

    def remove(self, name: str) -> bool:
        """Remove a model's files; returns whether the folder had it."""
        path = self.find(name)
        if path is None:
            return False
        if path.parent.name == "snapshots":
            path = path.parent.parent
        self._discard(path)
        if path.parent != self.folder:
            with suppress(OSError):  # the owner has more models
                path.parent.rmdir()
        return True

    def _discard(self, path: Path) -> None:
        """Remove a path of the library, itself if it is a link."""
        if path.is_symlink() or path.is_file():
            path.unlink()
            return
        shutil.rmtree(self._set_aside(path).parent)

    def _set_aside(self, path: Path) -> Path:
        """Take a path out of the library; returns where it is, alone in a folder."""
        aside = Path(tempfile.mkdtemp(prefix=".old-", dir=self.folder))
        try:
            return path.rename(aside / "model")
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def link(source: Path, target: Path) -> None:
    """Give a file a second name; where that is not possible, copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or (path / SETTINGS_FILE).is_file()


def _resolved(value: Any, folder: Path) -> Any:
    """A value of settings, with paths that begin with `./` as they are from anywhere."""
    return str(folder / value) if isinstance(value, str) and value.startswith("./") else value
