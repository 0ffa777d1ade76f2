"""Tries the faults of all modules whose record is not of their present source: fault_run.py

Works in a fork of a process that has imported everything. One that ends, or hangs, counts as a
fault that failed, and another goes on behind it. What was tried is kept in LOG, a line for each
fault, so that a run which is cut off continues, and by module in tests/server/fault_record.toml.

    PYTHONPATH=.:tests/support python tests/support/fault_run.py [--left] [MODULES...]

`--left` only prints what is left.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

from fault_sweep import FOLDER, Result, results_of
from fault_table import (
    REACHED,
    ROOT,
    TRIED,
    Line,
    Trial,
    digest,
    left,
    read_record,
    sources,
    trials_of,
    write_record,
)

LOG = Path(os.environ.get("MODULM_FAULT_LOG", "/tmp/modulm-faults.jsonl"))
#: Seconds after which a fault hangs.
PATIENCE = 400
STARTED = "MODULM_FAULT_SOURCES"
#: Of a fault that has begun and not ended: its process did not.
ENDED = "the process ended, or hung"


def digests() -> dict[str, str]:
    """Of all modules, as they were when the run began: a changed one is left for the next run."""
    if STARTED not in os.environ:
        os.environ[STARTED] = json.dumps({name: digest(path) for name, path in sources().items()})
    found: dict[str, str] = json.loads(os.environ[STARTED])
    return found


def unchanged(module: str) -> bool:
    return digest(sources()[module]) == digests()[module]


def tried(module: str, source: str) -> dict[Trial, str | None]:
    """The faults of a module that have begun, with what was wrong."""
    found: dict[Trial, str | None] = {}
    for text in LOG.read_text().splitlines() if LOG.exists() else ():
        line = json.loads(text)
        if (line["module"], line["source"]) == (module, source):
            found[Trial(*line["trial"])] = line["error"]
    return found


def work(modules: list[str]) -> None:
    """Try faults in this process."""
    import tests.conftest  # noqa: F401 - settings of the environment
    from fault_world import World

    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    threading.excepthook = lambda args: None
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for module in modules:
            if not unchanged(module):
                continue
            began = time.monotonic()
            wrong = try_module(world, module)
            print(module, f"{time.monotonic() - began:.1f} s", *wrong, sep="\n    ", flush=True)
        world.close()


def try_module(world: Any, module: str) -> list[str]:
    """Try the faults of a module that are not in the log; returns what went wrong."""
    from fault_world import Trials, in_turn

    source = digests()[module]
    done = tried(module, source)
    with LOG.open("a", buffering=1) as log:

        def note(trial: Trial, error: str | None) -> None:
            line = {"module": module, "source": source, "trial": trial, "error": error}
            log.write(json.dumps({**line, "time": time.time()}) + "\n")

        def begin(trial: Trial) -> None:
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            note(trial, ENDED)

        trials = Trials(world, module, begin, note)
        trials.run([one for one in in_turn(REACHED[module]) if one not in done])
    faulthandler.cancel_dump_traceback_later()
    return [str(one) for one in trials.wrong]


def by_scenarios(modules: list[str]) -> None:
    """Have all faults tried that scenarios reach, and record each module."""
    begun, sources_then = 0, digests()
    while modules := [module for module in modules if unchanged(module)]:
        environment = {**os.environ, "PYTHONPATH": f".{os.pathsep}tests/support"}
        command = [sys.executable, str(Path(__file__)), "--work", *modules]
        code = subprocess.Popen(command, cwd=ROOT, env=environment).wait()
        record, rest = read_record(), []
        for module in modules:
            source = sources_then[module]
            found = tried(module, source)
            trials = trials_of(REACHED[module])
            if not found.keys() >= set(trials):
                rest.append(module)
                continue
            failed = [f"{one}: {found[one]}" for one in trials if found[one]]
            record["scenarios"][module] = Line(
                source, len(REACHED[module]), len(trials), str(date.today()), failed
            )
        write_record(record)
        lines = len(LOG.read_text().splitlines()) if LOG.exists() else 0
        if lines == begun:
            print(rest.pop(0), "cannot be tried")
        modules, begun = rest, lines
        print("exit status", code, "left", len(rest), flush=True)


def by_tests(modules: list[str]) -> None:
    """Have all faults tried that tests reach, file by file, and record each module."""
    folder = LOG.with_suffix(".tests")
    folder.mkdir(exist_ok=True)
    keep_what_holds(folder, modules)
    rows = {(module, site): test for module in modules for site, test in TRIED[module].items()}
    (folder / "wanted.json").write_text(json.dumps({one: list(TRIED[one]) for one in modules}))
    files = sorted({test.partition("::")[0] for test in rows.values()})
    for file in files:
        chosen = dict.fromkeys(one for one in rows.values() if one.partition("::")[0] == file)
        command = [sys.executable, "-m", "pytest", "-q", "--everything", "-p", "fault_sweep"]
        environment = {**os.environ, FOLDER: str(folder), "PYTHONPATH": "tests/support"}
        for _ in range(20):  # it ends when one hangs, and goes on behind it
            with (folder / "out.txt").open("a") as out:
                code = subprocess.Popen(
                    [*command, "-n", "0", "-p", "no:cacheprovider", "--tb=short", *chosen],
                    cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
                ).wait()  # fmt: skip
            if code in range(6):
                break
        print(file, "exit status", code, flush=True)
        record_tests(folder, [one for one in modules if is_over(one, file)])


def is_over(module: str, file: str) -> bool:
    """Whether the module's rows name no file of tests behind this one."""
    return max(test.partition("::")[0] for test in TRIED[module].values()) <= file


def keep_what_holds(folder: Path, modules: list[str]) -> None:
    """Forget results of other sources, and those that failed."""
    log, stamp = folder / "tried.jsonl", folder / "sources.json"
    now = {module: digests()[module] for module in modules}
    then = json.loads(stamp.read_text()) if stamp.exists() else {}
    stamp.write_text(json.dumps(now))
    if not log.exists():
        return
    wrong = {one.site for one in results_of(folder) if one.error or not one.fired}
    kept = []
    for text in log.read_text().splitlines():
        module, site = json.loads(text)["site"]
        if (module, site) not in wrong and then.get(module) == now.get(module, "none"):
            kept.append(text)
    log.write_text("".join(f"{text}\n" for text in kept))


def record_tests(folder: Path, modules: list[str]) -> None:
    found: dict[str, list[Result]] = {}
    for one in results_of(folder):
        found.setdefault(one.site[0], []).append(one)
    record = read_record()
    for module in modules:
        results = [one for one in found.get(module, ()) if one.site[1] in TRIED[module]]
        fired = {one.site[1] for one in results if one.fired}
        failed = [f"{one.kind} at {one.site[1]}: {one.error}" for one in results if one.error]
        failed += [f"{site}: not reached" for site in TRIED[module] if site not in fired]
        count = sum(one.fired for one in results)
        record["tests"][module] = Line(
            digests()[module], len(TRIED[module]), count, str(date.today()), failed
        )
    write_record(record)


def forget_failures() -> None:
    """Of the log: what failed is tried again."""
    lines = LOG.read_text().splitlines() if LOG.exists() else []
    kept = [line for line in lines if json.loads(line)["error"] is None]
    LOG.write_text("".join(f"{line}\n" for line in kept))


def main() -> None:
    """Try what is left, and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--left", action="store_true")
    parser.add_argument("--work", action="store_true", help="in this process, by scenarios")
    parser.add_argument("modules", nargs="*", help="only these")
    options = parser.parse_args()
    if options.work:
        work(options.modules)
        return
    wanted = {
        name: [one for one in left(name) if not options.modules or one in options.modules]
        for name in ("scenarios", "tests")
    }
    if not options.left:
        import tests.conftest  # noqa: F401 - settings of the environment
        from forked_python import TEMPLATES

        digests()
        TEMPLATES.install()
        forget_failures()
        by_scenarios(wanted["scenarios"])
        if wanted["tests"]:
            by_tests(wanted["tests"])
    record = read_record()
    for name in wanted:
        for module in left(name):
            line = record[name].get(module)
            print(name, module, *(line.failed if line else ["not tried"]), sep="\n    ")


if __name__ == "__main__":
    main()
