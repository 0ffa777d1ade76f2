"""A plugin of pytest: what tests run fails at each of its awaits, socket and file operations, once.

Each test is run as it is, which tells the sites that it reaches, in its own process and in forks of
it (see forked_python.py). For each of these that is asked for, and for each kind of fault, it is
run again with that one fault, whatever then comes of it, and a third time without: then it must
pass, with the same fixtures of its module, so a server that lives on must still answer. Where it
does not, it is run with fixtures of its own, which must pass in any case: `needs a new server`.

The environment names the folder in `FOLDER`, which has `wanted.json` (sites by module), and gets
`tried.jsonl`, a line for each fault. To look for tests that let what is in `[elsewhere]` fail, for
at most so many seconds each:

    python tests/support/fault_sweep.py FOLDER SECONDS TESTS...
    PYTHONPATH=.:tests/support python tests/server/test_fault_sites.py FOLDER
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from attrs import frozen
from fault_sites import Faults, fail, kinds_of, transformed

FOLDER = "MODULM_FAULTS"
#: Seconds after which a run with a fault hangs.
PATIENCE = int(os.environ.get("MODULM_FAULT_PATIENCE", "150"))
#: How many kinds of faults are tried at a site.
KINDS = int(os.environ.get("MODULM_FAULT_KINDS", "9"))
Site = tuple[str, str]


class SharedFaults(Faults):
    """Faults of this process and of those that it starts: files in a folder tell what is armed."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._armed, self._fired = str(folder / "armed"), str(folder / "fired")

    def arm(self, site: Site, kind: str) -> None:
        self.disarm()
        os.symlink("\t".join((*site, kind)), self._armed)

    def disarm(self) -> None:
        for path in (self._armed, self._fired):
            if os.path.lexists(path):
                os.unlink(path)

    @property
    def has_fired(self) -> bool:
        return os.path.lexists(self._fired)

    def ask(self, site: Site, value: Any) -> Any:
        if site not in self.reached:
            self.reached.setdefault(site)
            self._append("\t".join(site))
        try:
            module, name, kind = os.readlink(self._armed).split("\t")
            if (module, name) != site:
                return value
            os.rename(self._armed, self._fired)  # one of all processes gets it
        except OSError:
            return value
        return fail(name, kind, value)

    def _append(self, line: str) -> None:
        try:
            with open(self.folder / "reached", "a") as file:
                file.write(line + "\n")
        except OSError:  # a process that may not write
            return

    def take_reached(self) -> list[Site]:
        """What all processes have reached since this was last asked."""
        path = self.folder / "reached"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        self.reached.clear()
        found = dict.fromkeys(tuple(line.split("\t")) for line in lines)
        return [site for site in found if len(site) == 2]  # type: ignore[misc]


def watch(folder: Path) -> tuple[SharedFaults, dict[str, list[str]]]:
    """Replace the code of the wanted modules in this process, now or when they are imported."""
    wanted: dict[str, list[str]] = json.loads((folder / "wanted.json").read_text())
    faults = SharedFaults(folder)
    here = [sys.modules[name] for name in wanted if name in sys.modules]
    faults.inside_for_ever(here)
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, name: str) -> Any:
        """Also of a module that is run as `__main__`."""
        if name in wanted:
            return transformed(Path(self.get_filename(name)), name)
        return original(self, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
    return faults, wanted


@frozen
class Result:
    """Of a fault. error: how the test failed without it, with a server of its own."""

    site: Site
    kind: str
    test: str
    fired: bool
    error: str | None


def results_of(folder: Path) -> list[Result]:
    """What was tried. A test that hung is one that failed; so is one that needed a new server,
    unless the fault kept the old one from starting."""
    tried: dict[tuple[Site, str], Result] = {}
    for line in (folder / "tried.jsonl").read_text().splitlines():
        one = json.loads(line)
        module, name = one["site"]
        if not module:
            continue
        error = one.get("after")
        if "begun" in one:
            error = "it hung"
        elif error is None and _left(one) > 2:
            error = f"{_left(one)} descriptors were left"
        elif error is None and one["renewed"] and not str(one["faulted"]).startswith("setup: "):
            error = f"it needed a new server: {one['first']}"
        result = Result((module, name), one["kind"], one["test"], bool(one.get("fired")), error)
        tried[result.site, result.kind] = result
    return list(tried.values())


def _left(one: dict[str, Any]) -> int:
    """Descriptors that were left by the fault, beside what the test leaves in any case."""
    return 0 if one["renewed"] else int(one.get("left", 0) - 2 * one.get("usual", 0))


def _message(reports: list[pytest.TestReport]) -> str | None:
    """The last lines of what failed in a test, or None."""
    for report in reports:
        if report.failed:
            return f"{report.when}: {str(report.longrepr)[-1500:]}"
    return None


def _nothing() -> None:
    pass


class Sweep:
    """Runs each test with the faults at the sites that it reaches first."""

    def __init__(self, folder: Path) -> None:
        self.faults, wanted = watch(folder)
        self._wanted = {(module, site) for module, sites in wanted.items() for site in sites}
        self._log = folder / "tried.jsonl"
        self._missed: dict[Site, int] = {}
        self._usual = 0
        self._skipped = {
            tuple(json.loads(line)["site"])
            for line in (self._log.read_text().splitlines() if self._log.exists() else ())
        }

    def _note(self, **line: Any) -> None:
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _run(self, item: Any, nextitem: Any) -> str | None:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            item._initrequest()
            self._forget_failed_fixtures(item)
            return _message(runtestprotocol(item, nextitem=nextitem, log=False))
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _forget_failed_fixtures(self, item: Any) -> None:
        """Fixtures that failed while they were made or ended are made again."""
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            for one in definitions:
                if one.cached_result is None or one.cached_result[2] is not None:
                    one.cached_result = None
                    one._finalizers.clear()

    def _descriptors(self) -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool | None:
        ihook = item.ihook
        ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        sibling = pytest.Function.from_parent(item.parent, name="_between", callobj=_nothing)
        self.faults.take_reached()
        reports = runtestprotocol(item, nextitem=sibling, log=False)
        reached = self.faults.take_reached()
        self._usual = 0
        if any(site in self._wanted for site in reached):  # beside the fixtures of its module
            before = self._descriptors()
            self._run(item, sibling)
            self._usual = max(0, self._descriptors() - before)
        if _message(reports) is None and not any(report.skipped for report in reports):
            for site in reached:
                if site in self._wanted and site not in self._skipped:
                    self._skipped.add(site)
                    for kind in kinds_of(site[1])[:KINDS]:
                        if not self._try(item, sibling, site, kind):
                            self._missed[site] = self._missed.get(site, 0) + 1
                            if self._missed[site] < 3:
                                self._skipped.discard(site)  # another test may reach it alone
                            break
        for report in reports:
            ihook.pytest_runtest_logreport(report=report)
        item.session._setupstate.teardown_exact(nextitem)
        ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _try(self, item: Any, sibling: Any, site: Site, kind: str) -> bool:
        line = {"site": site, "kind": kind, "test": item.nodeid}
        self._note(**line, begun=True)
        before, started = self._descriptors(), time.monotonic()
        self.faults.arm(site, kind)
        faulted = self._run(item, sibling)
        if not self.faults.has_fired:  # reached by fixtures of the module
            self._teardown(item)
            faulted = self._run(item, sibling)
        fired = self.faults.has_fired
        self.faults.disarm()
        after = self._run(item, sibling)
        renewed = False
        if after is not None:
            self._teardown(item)
            renewed, first = True, after
            after = self._run(item, sibling)
            line["first"] = first
        left = self._descriptors() - before
        self._note(
            **line, fired=fired, faulted=faulted, after=after, renewed=renewed, left=left,
            usual=self._usual, seconds=round(time.monotonic() - started, 2),
        )  # fmt: skip
        self.faults.take_reached()
        return fired

    def _teardown(self, item: Any) -> None:
        try:
            item.session._setupstate.teardown_exact(None)
        except Exception as error:  # the fault's own: it was told already
            self._note(site=["", ""], kind="", test=item.nodeid, teardown=repr(error)[-1500:])


def _limit_clients() -> None:
    """No client waits for minutes for a server that does not answer."""
    from httpx import _config

    original = _config.Timeout.__init__

    def limited(self: Any, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        for name in ("connect", "read", "write", "pool"):
            if (value := getattr(self, name)) is None or value > PATIENCE / 5:
                setattr(self, name, PATIENCE / 5)

    _config.Timeout.__init__ = limited  # type: ignore[method-assign]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    folder = Path(os.environ[FOLDER])
    _limit_clients()
    session.config.pluginmanager.register(Sweep(folder), "fault sweep")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for name in ("PytestUnhandledThreadExceptionWarning", "PytestUnraisableExceptionWarning"):
        config.addinivalue_line("filterwarnings", f"ignore::pytest.{name}")


def search(folder: Path, seconds: float, tests: list[str]) -> None:
    """Try what is in `[elsewhere]` with each of the tests, again after one that hung."""
    folder.mkdir(exist_ok=True)
    root = Path(__file__).parent.parent.parent
    rows = tomllib.loads((root / "tests/server/fault_sites.toml").read_text())
    (folder / "wanted.json").write_text(json.dumps(rows["elsewhere"]))
    command = [sys.executable, "-m", "pytest", "-q", "--everything", "-p", "fault_sweep", "-n", "0"]
    for test in tests:
        start = time.monotonic()
        while (left := seconds - (time.monotonic() - start)) > 0:
            process = subprocess.Popen(
                [*command, "-p", "no:cacheprovider", "--tb=short", *test.split()], cwd=root,
                env={**os.environ, FOLDER: str(folder), "MODULM_FAULT_KINDS": "1"},
                stdout=(folder / "out.txt").open("a"), stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                if process.wait(left) in range(6):
                    break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        print(test, f"{time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    search(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
