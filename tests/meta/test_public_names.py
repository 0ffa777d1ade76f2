"""`__all__` is there, complete and sorted; starting up imports nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax_trees import syntax_tree

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core"
MODULES = [
    path
    for path in sorted(CORE.rglob("*.py"))
    if (path.name != "__main__.py" and not path.name.startswith("_")) or path.name == "__init__.py"
]


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names: list[str] = ast.literal_eval(value)
                return names
    return None


def rule(name: str) -> tuple[int, str]:
    """Constants, classes, functions, as ruff and people sort them."""
    if name.isupper():
        return 0, name
    return (1 if name[:1].isupper() else 2), name


def is_command(decorator: ast.expr) -> bool:
    """Click's `@group.command(...)`: the command is reached through its group."""
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith(".command")


def test_all_is_sorted_and_complete() -> None:
    wrong = [
        f"{path.relative_to(CORE)}: {problem}" for path in MODULES for problem in problems(path)
    ]
    assert not wrong, "\n".join(wrong)


def problems(path: Path) -> Iterator[str]:
    """What is wrong with the `__all__` of a module."""
    tree = syntax_tree(path)
    body = [node for node in tree.body if not isinstance(node, ast.Expr)]
    if not body:
        return
    names = exported(tree)
    if names is None:
        yield "no __all__"
        return
    if names != sorted(names, key=rule):
        yield f"sorted: {sorted(names, key=rule)}"
    definitions = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    ]
    public = {node.name for node in definitions if not any(map(is_command, node.decorator_list))}
    if missing := public - set(names):
        yield f"public but not in __all__: {sorted(missing)}"
    unknown = set(names) - {node.name for node in definitions} - {"__version__"}
    if unknown and path.name != "__init__.py" and (unknown := unknown - set(bound(tree))):
        yield f"in __all__ but not here: {sorted(unknown)}"


def bound(tree: ast.Module) -> Iterator[str]:
    """Names that a module assigns or imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                yield from (alias.asname or alias.name for alias in aliases)


def test_every_name_of_the_package_can_be_had() -> None:
    import modulm

    for name in modulm.__all__:
        assert getattr(modulm, name) is not None


HEAVY = {"torch", "transformers", "fastapi", "uvicorn", "stevedore.extension", "numpy", "pandas"}


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (["--help"], HEAVY - {"stevedore.extension"} | {"pluggy", "cattrs"}),
        (["plugins", "list"], HEAVY - {"stevedore.extension"} | {"pluggy"}),
        (["--version"], HEAVY | {"pluggy", "cattrs"}),
    ],
)
def test_starting_imports_nothing_heavy(arguments: list[str], forbidden: set[str]) -> None:
    code = f"""
import sys
from modulm.cli.main import main
try:
    main({arguments!r})
except SystemExit as stop:
    assert not stop.code, stop.code
loaded = set(sys.modules) & {forbidden!r}
assert not loaded, loaded
plugins = {{name.partition(".")[0] for name in sys.modules if name.startswith("modulm_")}}
assert plugins <= {{"modulm_command_plugins"}} or {arguments!r} == ["--help"], plugins
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
