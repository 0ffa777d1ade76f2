"""Contract versions read from source, so that a list can show stale plugins without importing them.

Read are literals: `api = 2` in a class, `API = 2` in the contract's module. A class is followed
through `from ... import` and base classes inside its own package. What is computed is not known.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modulm.errors import PluginError
from modulm.plugins.declaration import Declaration
from modulm.plugins.kinds import find_kind

__all__ = ["api_in", "contract_version", "fits", "module_file", "stale", "stated_api"]

#: Maximum number of imports and base classes that are followed.
_DEPTH = 6


def stale(declaration: Declaration) -> str:
    """Describe how a driver's contract version differs from this modulm's, or return "".

    Imports no plugin, but the module of a kind that a package adds.
    """
    version, stated = contract_version(declaration.kind), stated_api(declaration)
    if version is None or stated is None or fits(stated, version):
        return ""
    written = f"{stated[0]} to {stated[1]}" if isinstance(stated, tuple) else f"{stated}"
    return f"for contract {written}, not {version}"


def stated_api(declaration: Declaration) -> int | tuple[int, int] | None:
    """Return the version that a driver states in its source or declaration; None if unknown."""
    stated = declaration.api
    if stated is None:
        module, _, name = declaration.target.partition(":")
        stated = _class_api(module, name, _DEPTH)
    if isinstance(stated, tuple):
        several = len(stated) == 2 and all(isinstance(item, int) for item in stated)
        return stated if several else None
    return stated if isinstance(stated, int) else None


def fits(stated: int | tuple[int, int], version: int) -> bool:
    """Whether a stated version or range includes a version."""
    lowest, highest = stated if isinstance(stated, tuple) else (stated, stated)
    return lowest <= version <= highest


def api_in(file: Path) -> int | None:
    """Return the `API` of a contract's module, given by its file; None if it has none."""
    version = _assigned(_parsed(file), "API")
    return version if isinstance(version, int) else None


@cache
def contract_version(kind: str) -> int | None:
    """Return this modulm's version of the contract of a kind; None if it has none."""
    try:
        contract = None if kind == "hooks" else find_kind(kind).contract
    except PluginError:
        return None
    version = None if contract is None else _assigned(_body(contract.partition(":")[0]), "API")
    return version if isinstance(version, int) else None


def _body(module: str) -> list[ast.stmt]:
    """Parse a module; [] if there is no source. Imports nothing."""
    file = module_file(module)
    return [] if file is None else _parsed(file)


@cache
def _parsed(file: Path) -> list[ast.stmt]:
    try:
        return ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []


def module_file(module: str) -> Path | None:
    """Return the file of a module, without importing its package; None if there is none."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or (rest and not spec.submodule_search_locations):
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *rest)
        for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def _assigned(body: list[ast.stmt], name: str) -> Any:
    """The literal that is assigned to a name, or None."""
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            try:
                return ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except ValueError:
                return None
    return None


def _class_api(module: str, name: str, depth: int) -> Any:
    """The `api` of a class of a module, its own or inherited, or None."""
    if depth == 0:
        return None
    for node in _body(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            own = _assigned(node.body, "api")
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            inherited = (_class_api(module, base, depth - 1) for base in bases)
            return own if own is not None else next((i for i in inherited if i is not None), None)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                source = _source(module, node)
                if (alias.asname or alias.name) == name and source.split(".")[0] == module.split(
                    "."
                )[0]:
                    return _class_api(source, alias.name, depth - 1)
    return None


def _source(module: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module that a statement imports from."""
    if node.level == 0:
        return node.module or ""
    file = module_file(module)
    package = (
        module if file is not None and file.name == "__init__.py" else module.rpartition(".")[0]
    )
    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])
