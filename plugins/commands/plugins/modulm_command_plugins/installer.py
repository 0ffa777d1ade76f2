"""Builds and runs the commands of uv or pip that install and remove plugin packages.

Every installed package is a constraint, so that a plugin cannot replace modulm, torch or another
plugin; a package that needs something else is not installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from modulm.errors import ConfigError
from modulm.plugins.index import normalized

__all__ = ["constraints", "dependents", "install_command", "run", "uninstall_command"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def _tool(python: str) -> tuple[list[str], list[str]]:
    """Return the start of a command (uv, or else pip) and what names the environment."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is not None:
        return [uv, "pip"], ["--python", python]
    if find_spec("pip") is None:
        raise ConfigError("install", "neither uv nor pip is installed in this environment")
    return [python, "-m", "pip"], []


def install_command(
    requirements: Sequence[str], limits: Path | None, python: str, more: Sequence[str]
) -> list[str]:
    """Return the command that installs. limits: a file of constraints. more: further arguments."""
    tool, where = _tool(python)
    limited = [] if limits is None else ["--constraint", str(limits)]
    return [*tool, "install", *where, *limited, *more, *requirements]


def uninstall_command(names: Sequence[str], python: str) -> list[str]:
    """Return the command that removes packages without asking."""
    tool, where = _tool(python)
    return [*tool, "uninstall", *(where or ["--yes"]), *names]


def constraints(without: Collection[str]) -> str:
    """Return every installed package with its version, for a file of constraints.

    without: packages that may change, by normalized name.
    """
    lines = set()
    for distribution in distributions():
        name, version = distribution.metadata["Name"], distribution.version
        if name and normalized(name) not in without:
            lines.add(f"{name}=={version}\n")
    return "".join(sorted(lines))


def dependents(name: str) -> list[str]:
    """Return the installed packages that need a package, without extras."""
    found = []
    for distribution in distributions():
        for requirement in distribution.requires or ():
            needed = _NAME.match(requirement)
            optional = "extra ==" in requirement.partition(";")[2]
            if needed and not optional and normalized(needed.group()) == normalized(name):
                found.append(str(distribution.metadata["Name"]))
    return sorted(set(found))


def run(command: Sequence[str]) -> int:
    """Run a command of the installer and return its status."""
    return subprocess.run(command, check=False).returncode
