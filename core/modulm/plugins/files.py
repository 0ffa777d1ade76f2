"""Plugins in single Python files named on the command line, which register drivers."""

from __future__ import annotations

import logging
import stat
import sys
from contextlib import redirect_stdout
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from modulm.errors import ConfigError

__all__ = ["load_file", "loaded_files"]

log = logging.getLogger("modulm.plugins")

_PREFIX = "modulm_file_"


def loaded_files() -> tuple[str, ...]:
    """Return the plugin files that this process has run."""
    modules = (module for name, module in sys.modules.copy().items() if name.startswith(_PREFIX))
    return tuple(str(module.__file__) for module in modules)


def load_file(flag: str, path: str) -> ModuleType:
    """Run a Python file that calls `modulm.register(kind, name, driver)`, once per process.

    Its hash is logged. Raises ConfigError naming `flag` if the file is missing, world-writable, or
    fails.
    """
    file = Path(path).resolve()
    name = f"{_PREFIX}{file.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(file):
        return known
    spec = spec_from_file_location(name, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(flag, f"{path} is not a Python file")
    if file.stat().st_mode & stat.S_IWOTH:
        raise ConfigError(flag, f"{path} is writable by everyone and therefore not run: chmod o-w")
    log.info("%s: %s, sha256 %s", flag, file, sha256(file.read_bytes()).hexdigest())
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(flag, f"{path} failed: {type(error).__name__}: {error}") from error
    return module
