"""Whoever imports a name of the last release finds it, or is told what it is called now."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from modulm.plugins.moved import moved, new_home

ROOT = Path(__file__).resolve().parents[2]


def released() -> tuple[list[str], list[str]]:
    """Modules of the last release, and `module.name` of what plugins are written with."""
    modules, found = [], []
    for line in (ROOT / "tests/canaries/released.txt").read_text().splitlines():
        if not line.startswith("#"):
            module, *names = line.split()
            modules.append(module)
            found += [f"{module}.{name}" for name in names]
    return modules, found


MODULES, NAMES = released()


def is_module(path: str) -> bool:
    """Whether a module has this path; those that other tests made for old names have no file."""
    try:
        spec = find_spec(path)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None


def is_name(path: str) -> bool:
    """Whether a dotted path is a name that a module has."""
    parent, _, name = path.rpartition(".")
    try:
        return bool(parent) and hasattr(import_module(parent), name)
    except ModuleNotFoundError:
        return False


def is_there(path: str) -> bool:
    """Whether a dotted path is what it was: modules and functions may be called alike."""
    return is_module(path) or (path not in MODULES and is_name(path))


def test_what_the_release_had_is_there_or_has_a_new_name() -> None:
    lost = [path for path in (*MODULES, *NAMES) if not is_there(path) and not known(path)]
    assert not lost, "add to core/modulm/plugins/moved.txt"


def known(path: str) -> bool:
    return path in moved() or path.rpartition(".")[0] in moved()


def test_the_new_names_are_there() -> None:
    missing = {old: new for old, new in moved().items() if " " not in new and not is_there(new)}
    assert not missing
    assert not list(filter(is_there, moved())), "these are there: no need to say"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import modulm.engine.runner", "modulm.engine.worker.model_runner"),
        ("from modulm.engine.pooling import Pooler", "modulm_pooler_standard.rows"),
        ("from modulm.server.desk import Desk", "is now modulm_server"),
        ("from modulm_server.generation import Desk", "modulm_server.generation.GenerationService"),
    ],
)
def test_the_error_says_where_it_is(statement: str, said: str) -> None:
    with pytest.raises(ImportError) as error:
        exec(statement)
    assert said in new_home(error.value)


@pytest.mark.parametrize("statement", ["import no_such_module", "from modulm import nothing"])
def test_other_errors_say_no_more(statement: str) -> None:
    with pytest.raises(ImportError) as error:
        exec(statement)
    assert new_home(error.value) == ""
