"""Imports are rewritten by `moved.txt`; plugins are compared with another modulm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from modulm.plugins import PluginManager
from modulm.plugins.manager import using
from modulm.plugins.moved import moved
from modulm_command_plugins.command import command
from modulm_command_plugins.migrate import migrated

MOVED = {
    "modulm.nn.moe": "modulm_layers.moe",
    "modulm.nn.names.split": "modulm_layers.rewrites.split",
    "modulm.old.Runner": "modulm.new.ModelRunner",
    "modulm.text": "modulm_tokenizers",
    "modulm.gone": "gone, since nothing reads it",
}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from modulm.nn.moe import A, B as C\n", "from modulm_layers.moe import A, B as C\n"),
        ("from modulm.nn import moe\n", "from modulm_layers import moe\n"),
        ("from modulm.old import Runner\n", "from modulm.new import ModelRunner as Runner\n"),
        ("from modulm.old import Runner as R\n", "from modulm.new import ModelRunner as R\n"),
        (
            "if True:\n    from modulm.nn.names import keep, split\nx = 1\n",
            (
                "if True:\n    from modulm.nn.names import keep\n"
                "    from modulm_layers.rewrites import split\nx = 1\n"
            ),
        ),
        (
            "import modulm.nn.moe, os\ny = modulm.nn.moe.A(modulm.nn.moe.B)\n",
            "import modulm_layers.moe, os\ny = modulm_layers.moe.A(modulm_layers.moe.B)\n",
        ),
        ("import modulm.nn.moe.deep as d  # why\n", "import modulm_layers.moe.deep as d  # why\n"),
        ("é = 1; from modulm.nn.moe import A\n", "é = 1; from modulm_layers.moe import A\n"),
        ("from modulm.nn.moe import *\n", "from modulm_layers.moe import *\n"),
        ("from modulm import text\n", "import modulm_tokenizers as text\n"),
        ("from .nn.moe import A\nimport os\n", "from .nn.moe import A\nimport os\n"),
    ],
)
def test_imports_are_rewritten(before: str, after: str) -> None:
    result = migrated(before, MOVED)
    assert result.text == after
    assert result.remarks == ()
    assert migrated(after, MOVED).text == after


def test_what_is_left_to_do_by_hand_is_said() -> None:
    text = "from modulm.gone import A\nfrom modulm.nn.moe import (\n    A,  # the first\n)\n"
    result = migrated(text, MOVED)
    assert result.text == text
    assert result.remarks == (
        "line 1: modulm.gone.A is gone, since nothing reads it",
        "line 2: has comments inside, change by hand: from modulm_layers.moe import A",
    )
    names = ", ".join(f"a_rather_long_name_{i}" for i in range(8))
    long = migrated(f"from modulm.nn.moe import {names}\n", MOVED).text
    assert long.startswith("from modulm_layers.moe import (\n    a_rather_long_name_0,\n")


def test_every_name_that_has_moved_can_be_migrated() -> None:
    lines = [f"from {old.rpartition('.')[0]} import {old.rpartition('.')[2]}\n" for old in moved()]
    result = migrated("".join(lines), moved())
    again = migrated(result.text, moved())
    assert again.text == result.text
    gone = [old for old, new in moved().items() if new.startswith("gone")]
    assert len(result.remarks) == len(gone)


def test_the_command_shows_a_difference_or_writes(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("from modulm.nn.moe import A\n")
    done = CliRunner().invoke(command, ["migrate", str(tmp_path), "--dry-run"])
    assert "-from modulm.nn.moe import A\n+from modulm_layers.moe import A\n" in done.stdout
    assert file.read_text() == "from modulm.nn.moe import A\n"
    done = CliRunner().invoke(command, ["migrate", str(file)])
    assert (done.exit_code, done.stdout) == (0, f"rewrote {file}\n")
    assert file.read_text() == "from modulm_layers.moe import A\n"
    (tmp_path / "b.py").write_text("def")
    assert "is no Python" in str(CliRunner().invoke(command, ["migrate", str(tmp_path)]).exception)


def test_doctor_against_another_version(install, driver, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for path, text in {
        "modulm/__init__.py": "",
        "modulm/contracts/__init__.py": "",
        "modulm/contracts/policy.py": "API = 2\nclass Policy: ...\n",
        "modulm/new.py": "ModelRunner = 1\n",
        "modulm/plugins/moved.txt": "modulm.old.Runner modulm.new.ModelRunner\n",
    }.items():
        (other / path).parent.mkdir(parents=True, exist_ok=True)
        (other / path).write_text(text)
    lazy = "def f():\n    from modulm.old import Runner\n    from modulm.contracts import nope\n"
    modules = {"mod_a": driver, "mod_b": driver.replace("api = 1", "api = (1, 2)"), "mod_c": lazy}
    points = {"one": "mod_a:Shortest", "two": "mod_b:Shortest"}
    install("modulm-a", {"modulm.schedulers": points, "modulm": {"three": "mod_c"}}, modules)
    arguments = ["doctor", "modulm-a", "--against", str(other)]
    with using(PluginManager()):
        done = CliRunner().invoke(command, [*arguments, "--json"])
        lines = CliRunner().invoke(command, arguments).stdout
        none = CliRunner().invoke(command, ["doctor", "modulm-a", "--against", str(tmp_path)])
    found = {row["plugin"]: row["problems"] for row in json.loads(done.stdout)}
    assert found == {
        "hooks/three": [
            "imports modulm.contracts.nope, which does not exist",
            "imports modulm.old.Runner, which is now modulm.new.ModelRunner",
        ],
        "schedulers/one": ["states api 1, the contract has 2"],
        "schedulers/two": [],
    }
    assert done.exit_code == 1
    assert "FAIL schedulers/one (modulm-a 1.0): states api 1, the contract has 2" in lines
    assert "contains no modulm" in str(none.exception)
    (other / "core").mkdir()
    (other / "modulm").rename(other / "core/modulm")
    with using(PluginManager()):
        checkout = CliRunner().invoke(command, [*arguments, "--json"])
    assert checkout.stdout == done.stdout
