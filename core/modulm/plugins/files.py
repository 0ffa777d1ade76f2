"""Plugins in a single file, named on the command line: the file registers what it offers."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from modulm.errors import ConfigError

__all__ = ["load_file"]


def load_file(flag: str, path: str) -> ModuleType:
    """Run a Python file that calls `modulm.register(kind, name, driver)`, once per process.

    Raises ConfigError that names `flag` for a file that is not there or that fails.
    """
    file = Path(path).resolve()
    name = f"modulm_file_{file.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(file):
        return known
    spec = spec_from_file_location(name, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise ConfigError(flag, f"{path} is no Python file")
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(flag, f"{path} failed: {type(error).__name__}: {error}") from error
    return module
