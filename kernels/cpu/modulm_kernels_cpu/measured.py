"""What was measured once on this machine, in `cpu.json` of the cache folder.

The file maps a section, which names the processor, the number of threads and the version of the
kernels, to ratios by name. A process that finds one uses it, so the choices of a machine do not
change from start to start; remove the file to measure again.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from modulm.config.environ import variables

__all__ = ["file", "measure_once", "section"]

log = logging.getLogger("modulm")

_CPUINFO = Path("/proc/cpuinfo")
#: What this process has read or measured: (file, section, name) -> ratio.
_known: dict[tuple[Path, str, str], float] = {}


def file() -> Path:
    """Return the file that measurements are kept in."""
    home = variables().get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "modulm" / "cpu.json"


def section(cpuinfo: Path = _CPUINFO) -> str:
    """Return the name of this machine's section."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    try:
        kernels = version("modulm-kernels-cpu")
    except PackageNotFoundError:
        kernels = "unknown"
    name = next(names, platform.machine())
    return f"{name}, {torch.get_num_threads()} threads, kernels {kernels}"


def measure_once(name: str, measure: Callable[[], float]) -> float:
    """Return the ratio `name`, as measured before on this machine, or measure and keep it.

    A file that cannot be read or written is reported, and the ratio is this process's.
    """
    path, part = file(), section()
    key = path, part, name
    if key not in _known:
        table = _read(path)
        found = table.get(part, {}).get(name)
        if found is None:
            found = round(float(measure()), 3)
            table.setdefault(part, {})[name] = found
            _write(path, table)
        _known[key] = found
    return _known[key]


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        table = json.loads(path.read_text())
        return {
            part: {name: float(ratio) for name, ratio in ratios.items()}
            for part, ratios in table.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.warning("%s: %s; it is measured again", path, error)
        return {}


def _write(path: Path, table: dict[str, dict[str, float]]) -> None:
    """Replace the file at once, since other processes may read it."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(table, indent=2, sort_keys=True))
        new.replace(path)
    except OSError as error:
        log.warning("%s: %s; each process measures for itself", path, error)
