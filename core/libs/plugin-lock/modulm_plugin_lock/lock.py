"""Take, write, read and check lock files.

A lock is a YAML file: `packages` (version, digest of files, and what each provides), `selection`
(`--plugins`), `options` (`--plugin-config`) and `files` (plugin files such as
`--tool-parser-plugin` takes, with their digests). Its own digest is the SHA-256 of the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, field, frozen

from modulm.errors import ConfigError
from modulm.plugins.index import is_first_party, normalized
from modulm.plugins.kinds import kind_of
from modulm.structure import Problem, structure_table
from modulm_plugin_lock.files import files_digest
from modulm_plugin_lock.flags import PluginLockConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = [
    "LockedPackage",
    "PluginLock",
    "check_config",
    "check_packages",
    "lock_digest",
    "read_lock",
    "take_lock",
]

FORMAT = 1
#: Maximum number of differences that an error lists.
_FEW = 10
_HEAD = """\
# Plugins of one environment, written by `modulm plugins lock`. A server that is started with
# --plugins-lock and this file refuses any other packages, files, selection and options.
"""


@frozen
class LockedPackage:
    """One distribution. provides: "kind/name" -> "package.module:attribute"."""

    version: str
    sha256: str
    provides: Mapping[str, str] = field(factory=dict)


@frozen
class PluginLock:
    """The contents of a lock file. packages: by normalized name, the core and libraries too."""

    version: int
    packages: Mapping[str, LockedPackage]
    selection: str = ""
    options: Mapping[str, Any] = field(factory=dict)
    files: Mapping[str, str] = field(factory=dict)

    def text(self) -> str:
        """Format the lock as YAML."""
        import yaml

        table = asdict(self)
        ordered = {"version": table.pop("version"), **dict(reversed(table.items()))}
        return _HEAD + yaml.safe_dump(ordered, sort_keys=False, width=100)


def _installed_packages() -> dict[str, LockedPackage]:
    """Describe every installed distribution that offers plugins or belongs to this project."""
    packages: dict[str, LockedPackage] = {}
    for distribution in distributions():
        points = distribution.read_text("entry_points.txt") or ""
        metadata = distribution.metadata
        name = metadata["Name"] or ""
        if normalized(name) in packages or not ("[modulm" in points or is_first_party(name)):
            continue
        provides = {
            f"{kind}/{point.name}": point.value
            for point in distribution.entry_points
            if (kind := kind_of(point.group)) is not None
        }
        packages[normalized(name)] = LockedPackage(
            metadata["Version"], files_digest(distribution, name), dict(sorted(provides.items()))
        )
    return dict(sorted(packages.items()))


def take_lock(selection: str, options: Mapping[str, Any], files: Iterable[str]) -> PluginLock:
    """Describe this environment. Imports no plugin.

    files: Python files that register plugins. Raises ConfigError if one cannot be read.
    """
    digests = {path: _digest("plugin_file", path) for path in files}
    return PluginLock(FORMAT, _installed_packages(), selection, dict(options), digests)


def _digest(flag: str, path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(flag, f"cannot read {path}: {error.strerror}") from error


@cache
def read_lock(path: str) -> tuple[PluginLock, str]:
    """Return a lock and the SHA-256 of its file, in hex; read once per process.

    Raises ConfigError naming `plugins_lock` if the file cannot be read or is no lock.
    """
    import yaml

    digest = _digest("plugins_lock", path)
    try:
        table = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        lock = structure_table(table if isinstance(table, dict) else {}, PluginLock)
    except (yaml.YAMLError, UnicodeDecodeError, Problem) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("plugins_lock", f"{path} is no lock of plugins: {reason}") from error
    if lock.version != FORMAT:
        raise ConfigError(
            "plugins_lock", f"{path} has format {lock.version}, this modulm reads {FORMAT}"
        )
    return lock, digest


def lock_digest(config: EngineConfig) -> str | None:
    """Return the SHA-256 of the lock that the configuration requires, in hex, or None."""
    path = config.group(PluginLockConfig).plugins_lock
    return None if path is None else read_lock(path)[1]


def check_packages(path: str) -> None:
    """Raise ConfigError with the differences if this environment is not the lock's."""
    lock, _ = read_lock(path)
    _refuse(path, list(_package_differences(lock.packages, _installed_packages())))


def check_config(path: str, config: EngineConfig) -> None:
    """Raise ConfigError if selection, options or plugin files differ from the lock's."""
    from modulm import plugins

    lock, _ = read_lock(path)
    differences = []
    selection = str(plugins.current().selection)
    if selection != lock.selection:
        differences.append(f"--plugins is {selection!r}, the lock has {lock.selection!r}")
    options = config.device.plugin_config
    if options != lock.options:
        differences.append(
            f"--plugin-config is {_plain(options)}, the lock has {_plain(lock.options)}"
        )
    for spec, file in config.values():
        if spec.registers and file:
            locked = lock.files.get(file)
            if locked is None:
                differences.append(f"{spec.option} {file} is not in the lock")
            elif locked != _digest(spec.name, file):
                differences.append(f"{spec.option} {file} has changed")
    _refuse(path, differences)


def _plain(value: Any) -> Any:
    """The value with plain dicts, for messages."""
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _package_differences(
    locked: Mapping[str, LockedPackage], installed: Mapping[str, LockedPackage]
) -> Iterator[str]:
    for name in sorted(locked.keys() | installed.keys()):
        before, now = locked.get(name), installed.get(name)
        if before is None and now is not None:
            yield f"{name} {now.version} is installed and not in the lock"
        elif now is None and before is not None:
            yield f"{name} {before.version} is in the lock and not installed"
        elif before is None or now is None or before == now:
            continue
        elif before.version != now.version:
            yield f"{name} is {now.version}, the lock has {before.version}"
        elif before.provides != now.provides:
            changed = sorted(dict(before.provides.items() ^ now.provides.items()))
            yield f"{name} {now.version} has other entry points: {', '.join(changed)}"
        else:
            yield f"{name} {now.version} has other files than the lock says"


def _refuse(path: str, differences: list[str]) -> None:
    if not differences:
        return
    more = len(differences) - _FEW
    lines = [*differences[:_FEW], *([f"{more} more differences"] if more > 0 else [])]
    raise ConfigError(
        "plugins_lock",
        f"the plugins differ from {path}: {'; '.join(lines)}. If that is intended, write a new "
        "lock with `modulm plugins lock`",
    )
