"""A fault at each await, socket and file operation of what serves: the server goes on, and nothing
is left of the request that met it.

`fault_sites.toml` has a row for each of them, found by AST: under "reached" with the scenario that
reaches it, or under "tried" with a test that is run with the fault. Calls that only look like
operations, because a function of this project has such a name, are under "calls" with that function
(written by hand); their operations have rows of their own. "elsewhere" has what is left, and, by
module, the tests that run it ("tests", written by hand). After a change:

    PYTHONPATH=.:tests/support .venv/bin/python tests/server/test_fault_sites.py

What has been tried is in `fault_record.toml`, by module and with a digest of its source. What is
left is tried by

    PYTHONPATH=.:tests/support .venv/bin/python tests/support/fault_run.py
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fault_model_parts
import httpx
import pytest
import samples
from fault_parts import PARTS
from fault_scenarios import SCENARIOS
from fault_sites import Faults, kinds_of, sites_of
from fault_sweep import FOLDER, results_of
from fault_table import (
    CALLS,
    ELSEWHERE,
    LIFE,
    REACHED,
    ROOT,
    TABLE,
    TESTS,
    TRIED,
    left,
    read_record,
    sources,
)  # fmt: skip
from fault_world import Trials, World, in_turn
from samples import parametrize_sample

from modulm_server.testing import Live

#: Modules that parts import while they run.
LAZY = (
    "modulm_executor_external_launcher.launched", "modulm_executor_ray.actor",
    "modulm_executor_ray.executor", "modulm_server.websocket_protocol",
)  # fmt: skip


def all_sites() -> dict[str, list[str]]:
    """Sites by module."""
    found = {module: sites_of(path) for module, path in sources().items()}
    return {module: sites for module, sites in found.items() if sites}


def covering(module: str) -> str | None:
    """The tests that run what no scenario reaches."""
    names = [name for name in TESTS if module == name or module.startswith(f"{name}.")]
    return TESTS[max(names, key=len)] if names else None


def test_each_has_a_row() -> None:
    sites = all_sites()
    tables: tuple[Any, ...] = (REACHED, TRIED, CALLS, ELSEWHERE)
    rows = {
        module: {site for table in tables for site in table.get(module, ())}
        for module in {module for table in tables for module in table}
    }
    missing = [f"{m}: {site}" for m in sites for site in sites[m] if site not in rows.get(m, ())]
    assert not missing, f"add a scenario and rewrite {TABLE.name}:\n" + "\n".join(missing)
    stale = [f"{m}: {site}" for m in rows for site in rows[m] if site not in sites.get(m, ())]
    assert not stale, f"rewrite {TABLE.name}:\n" + "\n".join(stale)
    assert not [module for module in ELSEWHERE if covering(module) is None]
    for tests in TESTS.values():
        assert tests.split(), TABLE.name
        assert all((ROOT / path).exists() for path in tests.split()), tests


def test_calls_that_are_no_operations_are_of_this_projects_functions() -> None:
    """Or of a tokenizer's, in memory. Each has the name that the site calls."""
    for sites in CALLS.values():
        for site, called in sites.items():
            module, _, path = called.partition(":")
            assert module.startswith("modulm") or module == "tokenizers", called
            found = importlib.import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
            assert callable(found), called
            text = site.partition(": call ")[2].partition(" (")[0]
            assert text.rpartition(".")[2] == path.rpartition(".")[2], (site, called)


def test_the_record_is_of_these_modules() -> None:
    """And of no fault that failed."""
    for name, table in (("scenarios", REACHED), ("tests", TRIED)):
        lines = read_record()[name]
        assert lines.keys() <= table.keys(), "run tests/support/fault_run.py"
        assert set(left(name)) <= table.keys()
        for module, line in lines.items():
            assert len(line.source) == 16, module
            assert line.faults >= line.sites - 1, module  # uvicorn's own loop cannot fail
            assert not line.failed, module


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    gc.collect()
    gc.freeze()  # what was imported is not looked at after each fault
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@parametrize_sample("module", REACHED, every=48)
def test_a_fault_at_each(world: World, module: str, caplog: pytest.LogCaptureFixture) -> None:
    if samples.everything and module not in left("scenarios"):
        pytest.skip("tried since its source was changed: tests/server/fault_record.toml")
    caplog.set_level(logging.CRITICAL)
    trials = Trials(world, module)
    trials.run(in_turn(REACHED[module]))
    assert not trials.wrong, "\n".join(f"{one}: {why}" for one, why in trials.wrong.items())


FILES = sorted({test.partition("::")[0] for rows in TRIED.values() for test in rows.values()})


@pytest.mark.exhaustive
@pytest.mark.parametrize("file", FILES)
def test_a_fault_at_each_that_a_test_reaches(file: str, tmp_path: Path) -> None:
    """Of those that no scenario reaches: the test ends, and passes when it is run once more."""
    modules = left("tests")
    rows = {
        (module, site): test
        for module, sites in TRIED.items()
        if module in modules
        for site, test in sites.items()
        if test.partition("::")[0] == file
    }
    if not rows:
        pytest.skip("tried since their source was changed: tests/server/fault_record.toml")
    wanted: dict[str, list[str]] = {}
    for module, site in rows:
        wanted.setdefault(module, []).append(site)
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    tests = dict.fromkeys(rows.values())
    command = [sys.executable, "-m", "pytest", "-q", "--everything", "-p", "fault_sweep", *tests]
    done = subprocess.run(
        [*command, "-n", "0", "-p", "no:cacheprovider"], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, FOLDER: str(tmp_path)},
    )  # fmt: skip
    tried = results_of(tmp_path)
    assert {one.site for one in tried if one.fired} == rows.keys(), done.stdout[-3000:]
    for one in tried:
        assert one.error is None, one
    assert done.returncode == 0, done.stdout[-3000:]


def main(*folders: str) -> None:
    """Write the table: run every scenario, and note which reaches what. What sweeps have tried is
    in their folders; what was in the table before stays.
    """

    def row(pair: tuple[str, str]) -> str:
        return f"{json.dumps(pair[0])} = {json.dumps(pair[1])}"

    sites = all_sites()
    for name in LAZY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        with world.server() as (_, http):
            http.get("/health")
        modules = [sys.modules[name] for name in sites if name in sys.modules]
        first: dict[tuple[str, str], str] = {}

        def note(name: str, live: Live | None = None, http: httpx.Client | None = None) -> None:
            try:
                world.run(live, http, name)
            except Exception:
                traceback.print_exc()
            for site in faults.reached:
                first.setdefault(site, name)
                if REACHED.get(site[0], {}).get(site[1]) == name:  # as it was
                    first[site] = name

        with Faults().inside(modules) as faults:
            slow = [name for name in PARTS if PARTS[name].__module__ == fault_model_parts.__name__]
            for name in (*(name for name in PARTS if name not in slow), LIFE):
                note(name)
            with world.server() as (live, http):
                for name in SCENARIOS:
                    note(name, live, http)
            for name in slow:
                note(name)
    calls = {(module, site): one for module, rows in CALLS.items() for site, one in rows.items()}
    first = {site: name for site, name in first.items() if site not in calls}
    lines = [
        "# Written by tests/server/test_fault_sites.py, but for the tests and calls.",
        "",
        "[tests]",
    ]
    lines += [*map(row, TESTS.items()), ""]
    for module, here in sites.items():
        rows = [(site, first[module, site]) for site in here if (module, site) in first]
        lines += [f"[reached.{json.dumps(module)}]", *map(row, rows), ""] if rows else []
    tried = {(module, site): test for module, rows in TRIED.items() for site, test in rows.items()}
    for folder in folders:
        results = [one for one in results_of(Path(folder)) if one.kind in kinds_of(one.site[1])]
        wrong = {one.site for one in results if one.error is not None}
        tried |= {one.site: one.test for one in results if one.fired and one.site not in wrong}
    tried = {site: test for site, test in tried.items() if site not in {*first, *calls}}
    for module, here in sites.items():
        rows = [(site, tried[module, site]) for site in here if (module, site) in tried]
        lines += [f"[tried.{json.dumps(module)}]", *map(row, rows), ""] if rows else []
    for module, here in sites.items():
        rows = [(site, calls[module, site]) for site in here if (module, site) in calls]
        lines += [f"[calls.{json.dumps(module)}]", *map(row, rows), ""] if rows else []
    lines += ["[elsewhere]"]
    for module, here in sites.items():
        if rest := [one for one in here if not {(module, one)} & {*first, *tried, *calls}]:
            lines += [f"{json.dumps(module)} = [", *(f"  {json.dumps(one)}," for one in rest), "]"]
    left = sum(line.startswith("  ") for line in lines)
    TABLE.write_text("\n".join(lines) + "\n")
    print(len(first), "and", len(tried), "of", sum(map(len, sites.values())), "left", left)


if __name__ == "__main__":
    main(*sys.argv[1:])
