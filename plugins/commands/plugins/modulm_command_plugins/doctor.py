"""`modulm plugins doctor`: each distribution's plugins imported and tested in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import click
from attrs import asdict, frozen

from modulm import plugins
from modulm.errors import PluginError
from modulm.plugins.declaration import Declaration

__all__ = ["Report", "examine"]

#: Seconds after which a distribution's process is given up.
_PATIENCE = 600.0
_PROCESSES = 2


@frozen
class Report:
    """What was found out about one plugin. `seconds` is the time its import took."""

    plugin: str
    origin: str
    ok: bool
    seconds: float | None = None
    api: str = ""
    error: str = ""
    kit: str = ""

    def line(self) -> str:
        """One line for people."""
        took = "" if self.seconds is None else f"import {self.seconds:.2f} s"
        api = f"api {self.api}" if self.api else ""
        facts = ", ".join(part for part in (took, api, self.kit, self.error) if part)
        return f"{'ok  ' if self.ok else 'FAIL'} {self.plugin} ({self.origin}): {facts}"

    def as_data(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def examine(declarations: Sequence[Declaration], *, kit: bool) -> Iterator[Report]:
    """Reports in order of distribution, each as soon as it and those before it are done."""
    ordered = sorted(declarations, key=lambda d: d.distribution)
    groups = [list(group) for _, group in groupby(ordered, key=lambda d: d.distribution)]
    with ThreadPoolExecutor(_PROCESSES) as pool:
        for reports in pool.map(lambda group: _in_process(group, kit), groups):
            yield from reports


def _in_process(declarations: Sequence[Declaration], kit: bool) -> list[Report]:
    wanted = json.dumps(
        {
            "selection": str(plugins.current().selection),
            "kit": kit,
            "plugins": [[d.kind, d.name, d.distribution] for d in declarations],
        }
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "modulm_command_plugins.doctor", wanted],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [_lost(d, f"gave no answer within {_PATIENCE:.0f} s") for d in declarations]
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    reports = [Report(**json.loads(line.removeprefix(_MARK))) for line in lines]
    why = f"its process ended with status {done.returncode}: {done.stderr.strip()[-300:]}"
    return reports + [_lost(d, why) for d in declarations[len(reports) :]]


def _lost(declaration: Declaration, why: str) -> Report:
    return Report(f"{declaration.kind}/{declaration.name}", declaration.origin, False, error=why)


#: Starts the lines that are reports, among whatever a plugin prints.
_MARK = "modulm-report: "


def _main(wanted: dict[str, Any]) -> None:
    manager = plugins.configure(wanted["selection"])
    for kind, name, distribution in wanted["plugins"]:
        found = [
            d
            for d in manager.everything()
            if (d.kind, d.name, d.distribution) == (kind, name, distribution)
        ]
        report = _report(manager, found[0], kit=wanted["kit"])
        click.echo(_MARK + json.dumps(report.as_data()))


def _report(manager: plugins.PluginManager, declaration: Declaration, *, kit: bool) -> Report:
    title = f"{declaration.kind}/{declaration.name}"
    if not manager.selection.permits(declaration):
        return Report(title, declaration.origin, True, error="switched off")
    start = time.perf_counter()
    try:
        if declaration.kind == "hooks":
            return _hook_report(manager, declaration)
        driver = manager.load_declared(declaration)
        seconds = time.perf_counter() - start
        manager.find(declaration.kind, declaration.name)
    except PluginError as error:
        seconds = time.perf_counter() - start
        return Report(title, declaration.origin, False, round(seconds, 3), error=str(error))
    api = str(getattr(driver, "api", ""))
    ok, result = _run_kit(declaration.kind, driver) if kit else (True, "contract kit not run")
    return Report(title, declaration.origin, ok, round(seconds, 3), api, kit=result)


def _hook_report(manager: plugins.PluginManager, declaration: Declaration) -> Report:
    start = time.perf_counter()
    manager.load_hooks()
    seconds = round(time.perf_counter() - start, 3)
    title = f"hooks/{declaration.name}"
    problem = manager.problems.get(declaration.name)
    if problem is not None:
        return Report(title, declaration.origin, False, seconds, error=str(problem))
    checks = manager.gather("modulm_doctor_checks")
    failed = "; ".join(f"{check.subject}: {check.message}" for check in checks if not check.ok)
    return Report(title, declaration.origin, not failed, seconds, error=failed)


def _run_kit(kind: str, driver: Any) -> tuple[bool, str]:
    from modulm.testing.kit import check, has_kit

    if not has_kit(kind):
        return True, ""
    try:
        check(kind, driver)
    except Exception as error:
        return False, f"contract kit failed: {type(error).__name__}: {error}"
    return True, "contract kit passed"


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
