"""`modulm` and `modulm plugins`, as a user types them, with plugins that work and that do not.

Commands run in this process, with a plugin manager of their own; `doctor` starts others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import modulm
from modulm.cli import main
from modulm.plugins import PluginManager
from modulm.plugins.manager import using
from modulm.plugins.selection import Selection
from modulm.testing.checkpoints import make_tiny
from modulm_command_plugins.template import templates

POLICY = """
from modulm.contracts.policy import Policy

class Shortest(Policy):
    "The shortest prompt first."
    name = "shortest"
    api = API

    def key(self, request):
        return request.prompt_len

    def victim(self, running):
        return 0
"""


def distribution(
    folder: Path, name: str, group: str, points: dict[str, str], **modules: str
) -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good and four bad distributions."""
    folder = tmp_path_factory.mktemp("plugins")
    group = "modulm.schedulers"
    good = POLICY.replace("API", "1")
    distribution(folder, "modulm-fine", group, {"shortest": "fine_mod:Shortest"}, fine_mod=good)
    distribution(folder, "modulm-raises", group, {"raises": "raises_mod:X"}, raises_mod="1 / 0")
    distribution(
        folder, "modulm-dies", group, {"dies": "dies_mod:X"}, dies_mod="import os; os._exit(9)"
    )
    old = POLICY.replace("API", "7")
    distribution(folder, "modulm-old", group, {"old": "old_mod:Shortest"}, old_mod=old)
    meddles = """
import random, signal, sys
import numpy
sys.setrecursionlimit(5000)
random.seed(1)
numpy.seterr(all="raise")
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
"""
    points = {"meddles": "meddles_mod:Shortest"}
    distribution(folder, "modulm-meddles", group, points, meddles_mod=meddles + good)
    twice = {"shortest": "twice_mod:Shortest"}
    distribution(folder, "modulm-twice", group, twice, twice_mod=good)
    commands = {"hello": "hello_mod:command", "sick": "sick_mod:command"}
    hello = (
        "import click\n@click.command()\ndef command():\n    'Say hello.'\n    click.echo('hello')"
    )
    sick = "raise RuntimeError('no voice')"
    distribution(folder, "modulm-says", "modulm.commands", commands, hello_mod=hello, sick_mod=sick)
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


def runner_with(folder: Path) -> Run:
    """What runs a command with the plugins of a folder, and forgets their modules."""

    def call(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        output, errors, status = StringIO(), StringIO(), None
        known = set(sys.modules)
        manager = PluginManager(Selection.parse(environ.get("MODULM_PLUGINS", "")))
        with (
            pytest.MonkeyPatch.context() as patch,
            using(manager), redirect_stdout(output), redirect_stderr(errors),
        ):  # fmt: skip
            patch.syspath_prepend(folder)
            for name, value in {"PYTHONPATH": str(folder), "COLUMNS": "200", **environ}.items():
                patch.setenv(name, value)
            try:
                main.main(arguments)
            except SystemExit as stop:
                status = stop.code
        for name in set(sys.modules) - known:
            if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
        texts = output.getvalue(), errors.getvalue()
        return subprocess.CompletedProcess(arguments, status, *texts)

    return call


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return runner_with(folder)


def test_a_process_of_its_own(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(folder), "MODULM_PLUGINS": "-modulm-twice"}
    command = [sys.executable, "-m", "modulm.cli.main", "plugins", "list", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    rows = {row["distribution"]: row["state"] for row in json.loads(done.stdout)}
    assert (rows["modulm-fine"], rows["modulm-twice"]) == ("ok", "off")


def test_list(run: Run) -> None:
    rows = json.loads(run("plugins", "list", "schedulers", "--json").stdout)
    state = {(row["name"], row["distribution"]): row["state"] for row in rows}
    assert state["raises", "modulm-raises"] == "ok"
    assert state["shortest", "modulm-fine"] == state["shortest", "modulm-twice"] == "conflict"
    assert {row["kind"] for row in rows} == {"schedulers"}


def test_list_says_what_is_switched_off(run: Run) -> None:
    text = run("--plugins=-modulm-twice", "plugins").stdout
    rows = [line.split() for line in text.splitlines() if "shortest" in line]
    assert [(row[2], row[4]) for row in rows] == [("modulm-fine", "ok"), ("modulm-twice", "off")]
    assert run("plugins", "list", MODULM_PLUGINS="-modulm-twice").stdout == text


def test_an_allow_list_does_not_shut_out_commands(run: Run) -> None:
    rows = json.loads(run("--plugins=modulm-fine", "plugins", "list", "--json").stdout)
    state = {(row["name"], row["distribution"]): row["state"] for row in rows}
    assert state["shortest", "modulm-fine"] == state["plugins", "modulm-command-plugins"] == "ok"
    assert state["fcfs", "modulm-scheduler-fcfs"] == "off"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plugins", "list", "schedulrs"], "there is no kind 'schedulrs'"),
        (["--plugins=modulm-fnie", "plugins"], "did you mean modulm-fine"),
        (
            ["plugins", "show", "shortst"],
            "did you mean shortest (modulm-fine 1.0 and modulm-twice 1.0)",
        ),
        (["plugins", "new", "isolators", "x"], "no template for isolators yet"),
        (["plugins", "new", "models", "a b"], "use letters, digits and single hyphens"),
        (["plugins", "new", "modls", "x"], "there is no kind 'modls'"),
        (["sick"], "no voice"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(
    run: Run, arguments: list[str], message: str
) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("modulm: ")
    assert done.stderr.count("\n") == 1


def test_show(run: Run) -> None:
    (row,) = json.loads(run("plugins", "show", "raises", "--json").stdout)
    assert "ZeroDivisionError" in row["error"]
    rows = json.loads(run("plugins", "show", "modulm-fine", "--json").stdout)
    assert rows[0]["about"] == "The shortest prompt first."
    assert rows[0]["api"] == "1"


def test_help_shows_a_broken_command_and_hurts_no_other(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "Say hello." in done.stdout
    assert "(broken)" in next(line for line in done.stdout.splitlines() if "sick" in line)
    assert run("hello").stdout == "hello\n"


def test_unknown_command_has_a_close_match(run: Run) -> None:
    done = run("helo")
    assert done.returncode == 2
    assert "Did you mean hello" in done.stderr


#: Plugins that are not well, and what the doctor says of them.
ILL = {
    "schedulers/raises": "ZeroDivisionError",
    "schedulers/dies": "ended with status 9",
    "schedulers/old": "written for version 7",
    "schedulers/shortest": "provided by",
}


@pytest.fixture(scope="module")
def reports(run: Run) -> dict[str, dict[str, str]]:
    """The doctor's reports by plugin."""
    names = "modulm-raises", "modulm-dies", "modulm-old", "modulm-twice"
    done = run("plugins", "doctor", *names, "meddles", "transformers_remote", "--json")
    assert done.returncode == 1
    return {report["plugin"]: report for report in json.loads(done.stdout)}


@pytest.mark.parametrize("name", ILL)
def test_doctor_finds(reports: dict[str, dict[str, str]], name: str) -> None:
    assert not reports[name]["ok"]
    assert ILL[name] in reports[name]["error"]


def test_doctor_finds_nothing_wrong(run: Run) -> None:
    done = run("plugins", "doctor", "fcfs", "--json")
    assert done.returncode == 0
    (report,) = json.loads(done.stdout)
    assert report["ok"]
    assert report["kit"] == "contract kit passed"
    assert float(report["seconds"]) >= 0
    assert report["changes"] == ""


def test_doctor_names_what_a_package_changes_for_others(
    reports: dict[str, dict[str, str]],
) -> None:
    assert reports["schedulers/meddles"]["changes"] == (
        "changes Python's recursion limit, Python's random numbers, the handler of SIGUSR1, "
        "numpy's handling of errors"
    )


def test_doctor_has_no_checkpoint_to_try_foreign_code_with(
    reports: dict[str, dict[str, str]],
) -> None:
    report = reports["models/transformers_remote"]
    assert report["ok"]
    assert report["kit"] == "contract kit not run: the model's code comes with a checkpoint"


NEW = {
    "models": "foo",
    "attention": "slow",
    "quantization": "round8",
    "platforms": "chip",
    "tool_parsers": "tools",
    "reasoning_parsers": "thoughts",
    "hooks": "greeting",
    "commands": "hi",
    "schedulers": "shortly",
    "logits_processors": "damp",
    "grammars": "lists",
    "loaders": "plainfile",
    "tokenizers": "script",
    "speculators": "echo",
    "executors": "aside",
    "kv_connectors": "crate",
    "step_parts": "slower",
    "adapters": "scales",
    "adapter_resolvers": "table",
    "routes": "count",
    "transcribers": "Hark",
    "speakers": "Say",
    "media_families": "Look",
    "io_processors": "cover",
    "stat_loggers": "notes",
    "kernels": "fused",
    "ops": "soft-clamp",
    "poolers": "mean",
    "worker_functions": "norms",
    "checkpoints": "poem",
    "flags": "salute",
    "collectives": "store",
    "chat_templates": "plainly",
    "weight_transfer": "inline",
}
#: Run by default; the others, and their kits, by tests/unit/plugins/test_kits.py.
OWN_TESTS = ("models", "hooks", "commands", "adapter_resolvers", "schedulers")


def test_every_new_package_passes_its_own_tests(tmp_path: Path) -> None:
    assert set(NEW) == set(templates())
    for kind in OWN_TESTS:
        name = NEW[kind]
        done = CliRunner().invoke(main.cli, ["plugins", "new", kind, name, "--into", str(tmp_path)])
        assert done.exit_code == 0, done.output
    folders = [str(folder) for folder in sorted(tmp_path.iterdir())]
    assert len(folders) == len(OWN_TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *folders]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path
    )
    assert "7 passed" in done.stdout, done.stdout  # hooks and commands have two


def test_new_does_not_overwrite(tmp_path: Path) -> None:
    arguments = ["plugins", "new", "hooks", "x", "--into", str(tmp_path)]
    assert CliRunner().invoke(main.cli, arguments).exit_code == 0
    again = CliRunner().invoke(main.cli, arguments)
    assert "already exists" in str(again.exception)


def test_explain(run: Run, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    done = run("explain", str(folder), "--json", "--device", "cpu")
    decisions = {d["subject"].partition(" (")[0]: d for d in json.loads(done.stdout)}
    assert {
        subject: decisions[subject]["winner"]
        for subject in ("device", "model", "quantization", "dtype", "loader")
    } == {
        "device": "cpu",
        "model": "LlamaForCausalLM",
        "quantization": "none",
        "dtype": "float32",
        "loader": "safetensors",
    }
    attention = decisions["attention"]
    assert attention["winner"] in {verdict["name"] for verdict in attention["candidates"]}
    rejected = {v["name"]: v["reason"] for v in decisions["loader"]["candidates"]}
    assert rejected["dummy"]
    assert all(decision["reason"] for decision in decisions.values())
    text = run("explain", str(folder), "--device", "cpu").stdout
    assert "attention" in text
    assert "  dummy" not in text
    assert "candidates were rejected: --all shows them, with reasons" in text
    everything = run("explain", str(folder), "--device", "cpu", "--all").stdout
    assert "  dummy" in everything
    assert "candidates were rejected" not in everything


def test_explain_an_architecture_that_nobody_has(run: Run, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["NobodyForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    done = run("explain", str(folder), "--device", "cpu")
    assert done.returncode == 2
    assert done.stderr.endswith("; or --model-impl transformers\n")
    assert "pip install" not in done.stderr


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packages that take over, hang, are misspelt, or fail their own checks."""
    folder = tmp_path_factory.mktemp("foreign")
    good = POLICY.replace("API", "1")
    distribution(
        folder, "modulm-typo", "modulm.scheduler", {"typo": "typo_mod:Shortest"}, typo_mod=good
    )
    distribution(folder, "modulm-dash", "modulm_schedulers", {"dash": "typo_mod:Shortest"})
    over = """
from modulm.plugins import Check, Declaration, hookimpl
print("noise")

@hookimpl
def modulm_platforms():
    return [Declaration("cpu", "modulm_platform_cpu:CpuPlatform", api=1, priority=1)]

@hookimpl
def modulm_doctor_checks():
    return [Check("licence", False, "has run out")]
"""
    distribution(folder, "modulm-over", "modulm", {"over": "over_mod"}, over_mod=over)
    wrong = "from modulm.plugins import hookimpl\n@hookimpl\ndef modulm_doctor_checks(): return 5"
    distribution(folder, "modulm-wrong", "modulm", {"wrong": "wrong_mod"}, wrong_mod=wrong)
    hangs = "import threading\nthreading.Event().wait()"
    distribution(
        folder, "modulm-hangs", "modulm.schedulers", {"hangs": "hangs_mod:X"}, hangs_mod=hangs
    )
    return folder


@pytest.fixture(scope="module")
def run_foreign(foreign: Path) -> Run:
    return runner_with(foreign)


def test_list_shows_who_takes_over_and_what_is_misspelt(run_foreign: Run) -> None:
    done = run_foreign("plugins", "list", "--json")
    state = {(r["name"], r["distribution"]): r["state"] for r in json.loads(done.stdout)}
    assert state["cpu", "modulm-over"] == f"in place of modulm-platform-cpu {modulm.__version__}"
    assert state["cpu", "modulm-platform-cpu"] == "replaced by modulm-over 1.0"
    assert state["typo", "modulm-typo"].startswith("there is no kind 'scheduler' (did you mean sch")
    assert "(did you mean schedulers?)" in state["dash", "modulm-dash"]
    assert "noise" in done.stderr
    free = run_foreign("plugins", "list", "--metadata", "--json")
    assert ("cpu", "modulm-over") not in {
        (r["name"], r["distribution"]) for r in json.loads(free.stdout)
    }
    assert "noise" not in free.stderr


@pytest.mark.parametrize("arguments", [["plugins", "list", "schedulers"], ["--help"]])
def test_a_stale_deny_list_is_no_end(run_foreign: Run, arguments: list[str]) -> None:
    done = run_foreign(*arguments, MODULM_PLUGINS="-modulm-gone")
    assert done.returncode == 0, done.stderr
    if "list" in arguments:
        assert "modulm-scheduler-fcfs" in done.stdout
        assert "no installed plugin is called 'modulm-gone'" in done.stderr


def test_doctor_over_several_and_over_what_hangs(run_foreign: Run) -> None:
    done = run_foreign("plugins", "doctor", "--third-party", "--json", "--import-timeout", "6")
    reports = {report["plugin"]: report for report in json.loads(done.stdout)}
    assert done.returncode == 1
    assert set(reports) >= {
        "hooks/over", "hooks/wrong", "schedulers/hangs", "scheduler/typo", "modulm_schedulers/dash"
    }  # fmt: skip
    assert not [name for name, report in reports.items() if report["ok"]]
    assert reports["schedulers/hangs"]["error"].startswith("its import took more than 6 s")
    assert "did you mean schedulers?" in reports["scheduler/typo"]["error"]
    assert reports["hooks/over"]["error"] == "licence: has run out"
    assert "modulm_doctor_checks raised, or answered" in reports["hooks/wrong"]["error"]
    assert not any("modulm-scheduler-fcfs" in report["origin"] for report in reports.values())


def test_doctor_of_several_names(run: Run) -> None:
    done = run("plugins", "doctor", "fcfs", "priority", "modulm-fine", "--no-kit", "--json")
    names = [(r["plugin"], r["kit"]) for r in json.loads(done.stdout)]
    assert ("schedulers/fcfs", "contract kit not run") in names
    assert len(names) == 3


def test_an_error_in_anothers_command_is_one_line_that_says_whose_it_is(folder: Path) -> None:
    source = "import click\n@click.command()\ndef command():\n    {}['key']"
    points = {"stumble": "stumble_mod:command"}
    distribution(folder, "modulm-stumbles", "modulm.commands", points, stumble_mod=source)
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "modulm", "stumble"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("modulm: commands/stumble (modulm-stumbles 1.0): command (")
    assert done.stderr.count("\n") == 1


def test_what_new_prints_is_what_show_knows(tmp_path: Path) -> None:
    for kind, name in NEW.items():
        arguments = ["plugins", "new", kind, name, "--into", str(tmp_path)]
        kind_shown = CliRunner().invoke(main.cli, arguments).output.split()[-1]
        text = next(tmp_path.glob(f"modulm*{name.lower()}*/pyproject.toml")).read_text()
        assert f"\n{kind_shown} = " in text, (kind, kind_shown)


def test_add_puts_further_drivers_into_a_package(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main.cli, ["plugins", *arguments])

    assert run("new", "schedulers", "shortly", "--into", str(tmp_path)).exit_code == 0
    folder = tmp_path / "modulm-scheduler-shortly"
    for kind, name in (("schedulers", "longly"), ("tool_parsers", "one"), ("tool_parsers", "two")):
        done = run("add", kind, name, "--to", str(folder))
        assert done.exit_code == 0, done.output
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {
        "modulm.schedulers": {
            "shortly": "modulm_scheduler_shortly:ShortlyPolicy",
            "longly": "modulm_scheduler_shortly.longly:LonglyPolicy",
        },
        "modulm.tool_parsers": {
            "one": "modulm_scheduler_shortly.one:OneToolParser",
            "two": "modulm_scheduler_shortly.two:TwoToolParser",
        },
    }
    assert [line.partition(">")[0] for line in project["dependencies"]] == [
        "modulm-parsing",
        "modulm",
    ]
    fits = tomllib.loads((folder / "modulm_scheduler_shortly/fits.toml").read_text())
    assert set(fits["tool_parsers"]) == {"one", "two"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert "4 passed" in done.stdout, done.stdout
    before = (folder / "pyproject.toml").read_text()
    again = run("add", "schedulers", "longly", "--to", str(folder))
    assert "longly.py already exists" in str(again.exception)
    (folder / "modulm_scheduler_shortly/longly.py").unlink()
    (folder / "tests/test_longly.py").unlink()
    again = run("add", "schedulers", "longly", "--to", str(folder))
    assert "already has 'longly' in 'modulm.schedulers'" in str(again.exception)
    assert (folder / "pyproject.toml").read_text() == before
    assert not (folder / "tests/test_longly.py").exists()
    assert "has no pyproject.toml" in str(run("add", "hooks", "x", "--to", str(tmp_path)).exception)
