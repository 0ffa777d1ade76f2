"""`modulm collect-env`: facts about the machine and the installation, for bug reports."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click

import modulm

__all__ = ["command"]

_PACKAGES = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "pluggy",
    "stevedore", "fastapi", "uvicorn", "triton",
)  # fmt: skip


@click.command("collect-env")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """Print versions, machine, plugins and environment, with secrets masked."""
    report = _report()
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    for title, rows in report.items():
        click.secho(title, bold=True)
        width = max((len(name) for name in rows), default=0)
        for name, value in rows.items():
            click.echo(f"  {name:{width}}  {value}")


def _report() -> dict[str, dict[str, Any]]:
    from modulm_command_collect_env.environment import reported_environment

    return {
        "modulm": {"version": modulm.__version__, "python": sys.version.split()[0]},
        "packages": _packages(),
        "machine": _machine(),
        "platforms": _platforms(),
        "plugins": _plugins(),
        "environment": reported_environment(),
    }


def _packages() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _machine() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": f"{usable} usable of {os.cpu_count()}",
        "memory": _memory(),
        "c++ compiler": _compiler(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{size / 2**30:.1f} GiB"


def _compiler() -> str:
    from shutil import which

    return next((path for name in ("c++", "g++", "clang++") if (path := which(name))), "none")


def _platforms() -> dict[str, str]:
    """The probe result of each installed platform, or its error."""
    from modulm.contracts.platform import Probe
    from modulm.errors import ModulmError
    from modulm.plugins import manager
    from modulm.plugins.calls import ask

    plugins = manager.current()
    probes: dict[str, str] = {}
    for declared in plugins.names("platforms"):
        try:
            driver = plugins.load_declared(declared)
            probe = ask(declared, driver, "probe", Probe)
            probes[declared.name] = f"score {probe.score}: {probe.reason}"
        except ModulmError as error:
            probes[declared.name] = f"broken: {error}"
    return probes


def _plugins() -> dict[str, str]:
    from modulm.plugins import manager

    names_by_origin: dict[str, list[str]] = {}
    for declared in manager.current().everything():
        names_by_origin.setdefault(declared.origin, []).append(f"{declared.kind}/{declared.name}")
    return {origin: ", ".join(sorted(names)) for origin, names in sorted(names_by_origin.items())}
