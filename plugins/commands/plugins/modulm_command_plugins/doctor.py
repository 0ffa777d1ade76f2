"""`modulm plugins doctor`: imports and tests each plugin in a separate process, several at a time.

The processes are forked from one that has imported what every kit needs, so the measured import
time is the plugin's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import click
from attrs import asdict, field, frozen, mutable

from modulm import plugins
from modulm.config.environ import isolated
from modulm.errors import ModulmError
from modulm.plugins.declaration import Declaration
from modulm.plugins.index import is_first_party
from modulm.plugins.selection import Selection
from modulm_command_plugins.manifest import manifest_problems
from modulm_isolation.process_state import changes, process_state

__all__ = ["Report", "examine"]

#: Number of plugins above which common modules are imported once in the parent.
_MANY = 8
_SHARED = ("torch", "modulm_layers", "modulm.loading")
_KITS = ("transformers.modeling_layers", "transformers.generation", "modulm.testing.models")


@frozen
class Report:
    """The result for one plugin.

    seconds: duration of its import. changes: what its import changes for others in the process.
    """

    plugin: str
    origin: str
    ok: bool
    seconds: float | None = None
    api: str = ""
    error: str = ""
    kit: str = ""
    changes: str = ""

    def line(self) -> str:
        """Format the report as one line."""
        took = "" if self.seconds is None else f"import {self.seconds:.2f} s"
        api = f"api {self.api}" if self.api else ""
        facts = ", ".join(part for part in (took, api, self.kit, self.changes, self.error) if part)
        return f"{'ok  ' if self.ok else 'FAIL'} {self.plugin} ({self.origin}): {facts}"

    def as_data(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def examine(
    declarations: Sequence[Declaration],
    *,
    kit: bool,
    jobs: int | None = None,
    import_timeout: float = 30.0,
    kit_timeout: float = 300.0,
) -> Iterator[Report]:
    """Yield a report for each plugin, as soon as it is done."""
    settings = {
        "selection": str(plugins.current().selection),
        "kit": kit,
        "jobs": jobs or len(os.sched_getaffinity(0)),
        "limits": [import_timeout, kit_timeout],
        "plugins": [[d.kind, d.name, d.distribution] for d in declarations],
    }
    missing = {_key(d): d for d in declarations}
    command = [sys.executable, "-m", "modulm_command_plugins.doctor", json.dumps(settings)]
    env = {**isolated(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        for line in process.stdout or ():
            key, report = json.loads(line)
            del missing[tuple(key)]
            yield Report(**report)
    for declaration in missing.values():
        yield _failed_report(
            declaration, f"the doctor's process ended with status {process.returncode}"
        )


def _key(declaration: Declaration) -> tuple[str, str, str]:
    return declaration.kind, declaration.name, declaration.distribution


def _failed_report(declaration: Declaration, why: str) -> Report:
    return Report(f"{declaration.kind}/{declaration.name}", declaration.origin, False, error=why)


# In the process that forks the others.


@mutable(eq=False)
class _Job:
    """One plugin's process. It sends its import's seconds, then its report."""

    declaration: Declaration
    process: Any
    answers: Connection
    errors: IO[bytes]
    deadline: float
    imported: bool = field(default=False)

    def failed_report(self, why: str) -> Report:
        """The report for a process that did not send one."""
        self.errors.seek(0)
        output = self.errors.read().decode(errors="replace").strip()[-300:]
        return _failed_report(self.declaration, f"{why}: {output}" if output else why)


def _main(settings: Mapping[str, Any]) -> None:
    manager = plugins.configure(settings["selection"])
    known = {_key(d): d for d in manager.everything()}
    waiting = [known[tuple(key)] for key in settings["plugins"]]
    _share(manager, (*_SHARED, *(_KITS if settings["kit"] else ())) if len(waiting) > _MANY else ())
    running: dict[Connection, _Job] = {}
    while waiting or running:
        while waiting and len(running) < settings["jobs"]:
            job = _start(manager, waiting.pop(0), settings)
            running[job.answers] = job
        first = min(job.deadline for job in running.values())
        ready = wait(list(running), max(0.0, first - time.monotonic()))
        for job in list(running.values()):
            report = _look(job, job.answers in ready, settings["limits"])
            if report is not None:
                del running[job.answers]
                job.process.kill()
                job.process.join()
                click.echo(json.dumps([_key(job.declaration), report.as_data()]))


def _share(manager: plugins.PluginManager, more: Sequence[str]) -> None:
    """Import modules that all children would import. Only this project's own, since others' code
    could break the parent.
    """
    hooks = [d for d in manager.everything() if d.kind == "hooks"]
    modules = [d.target.partition(":")[0] for d in hooks if is_first_party(d.distribution)]
    for module in (*modules, *more):
        try:
            import_module(module)
        except ImportError:
            continue  # reported by its own child


def _start(
    manager: plugins.PluginManager, declaration: Declaration, settings: Mapping[str, Any]
) -> _Job:
    context = get_context("fork")
    answers, sending = context.Pipe(duplex=False)
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as its job
    process = context.Process(
        target=_child, args=(sending, errors.fileno(), manager, declaration, settings["kit"])
    )
    process.start()
    sending.close()
    deadline = time.monotonic() + settings["limits"][0]
    return _Job(declaration, process, answers, errors, deadline)


def _look(job: _Job, ready: bool, limits: Sequence[float]) -> Report | None:
    """Return a job's report if it has ended or timed out."""
    try:
        while ready or job.answers.poll():
            ready = False
            answer = job.answers.recv()
            if isinstance(answer, Report):
                return answer
            job.imported, job.deadline = True, time.monotonic() + limits[1]
    except EOFError:
        job.process.join()
        return job.failed_report(f"its process ended with status {job.process.exitcode}")
    if time.monotonic() < job.deadline:
        return None
    what, limit = ("its contract kit", limits[1]) if job.imported else ("its import", limits[0])
    return job.failed_report(f"{what} took more than {limit:g} s")


# In a plugin's own process.


def _child(
    answers: Connection,
    errors: int,
    manager: plugins.PluginManager,
    declaration: Declaration,
    kit: bool,
) -> None:
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    before = process_state()
    start = time.perf_counter()

    def took() -> float:
        return round(time.perf_counter() - start, 3)

    title, origin = f"{declaration.kind}/{declaration.name}", declaration.origin
    if not manager.selection.permits(declaration):
        answers.send(Report(title, origin, True, error="switched off"))
        return
    if wrong := "; ".join(manifest_problems(declaration)):
        answers.send(Report(title, origin, False, error=wrong))
        return
    try:
        if declaration.kind == "hooks":
            problem = _hook_problem(declaration)
            seconds, ok, result, changed = took(), not problem, "", changes(before)
            if ok and kit:
                answers.send(seconds)
                module = import_module(declaration.target.partition(":")[0])
                ok, result = _run_kit("hooks", module)
            answers.send(
                Report(title, origin, ok, seconds, error=problem, kit=result, changes=changed)
            )
            return
        driver = manager.load_declared(declaration)
        seconds, changed = took(), changes(before)
        answers.send(seconds)
        manager.find(declaration.kind, declaration.name)
    except ModulmError as error:
        answers.send(Report(title, origin, False, took(), error=str(error)))
        return
    api = str(getattr(driver, "api", ""))
    ok, result = _run_kit(declaration.kind, driver) if kit else (True, "contract kit not run")
    answers.send(Report(title, origin, ok, seconds, api, kit=result, changes=changed))


def _hook_problem(declaration: Declaration) -> str:
    """Describe what is wrong with a hook plugin, or return "". Raises PluginError."""
    isolated = plugins.PluginManager(Selection(allow=(f"hooks/{declaration.name}",)))
    hook = isolated.hook.modulm_doctor_checks
    before = len(hook.get_hookimpls())
    checks = isolated.gather("modulm_doctor_checks")
    if len(hook.get_hookimpls()) < before:
        return "modulm_doctor_checks raised, or answered with something that is no Check"
    return "; ".join(f"{check.subject}: {check.message}" for check in checks if not check.ok)


def _run_kit(kind: str, driver: Any) -> tuple[bool, str]:
    from modulm.testing.kit import KitNotRun, check, has_kit

    if not has_kit(kind):
        return True, "kit: none"
    if kind == "models" and driver.remote_code:
        return True, "contract kit not run: the model's code comes with a checkpoint"
    try:
        left_out = check(kind, driver)
    except KitNotRun as reason:
        return True, f"contract kit not run: {reason}"
    except (Exception, SystemExit) as error:
        return False, f"contract kit failed: {type(error).__name__}: {error}"
    return True, f"contract kit passed, {left_out}" if left_out else "contract kit passed"


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
