"""Checks plugins against another version of modulm, from its source and theirs.

Compared are contract versions, and imports of modulm's modules. Nothing is imported or run: the
other version is a folder with its packages, or a checkout of its repository.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from modulm.errors import ConfigError, PluginError
from modulm.plugins.declaration import Declaration
from modulm.plugins.kinds import find_kind, kind_names
from modulm_command_plugins.migrate import new_name, sources
from modulm_command_plugins.static_api import api_in, fits, module_file, stated_api

__all__ = ["packages_of_contracts", "problems_against"]


def packages_of_contracts() -> list[str]:
    """Return the distributions whose modules define contracts."""
    paths = [contract for kind in kind_names() if (contract := _contract(kind))]
    packages = {path.partition(".")[0].partition(":")[0] for path in paths}
    return sorted(package.replace("_", "-") for package in packages)


def _contract(kind: str) -> str | None:
    try:
        return find_kind(kind).contract
    except PluginError:
        return None


def problems_against(
    declarations: Sequence[Declaration], folder: Path
) -> dict[Declaration, list[str]]:
    """Return what each plugin must change for the modulm in `folder`.

    Raises ConfigError if there is no modulm in it.
    """
    homes = [folder, folder / "core"]
    homes += [path.parent for path in sorted(folder.glob("core/*/*/pyproject.toml"))]
    core = _home(homes, "modulm")
    if core is None:
        raise ConfigError("against", f"{folder} contains no modulm")
    lines = (core / "modulm/plugins/moved.txt").read_text(encoding="utf-8").splitlines()
    moved = dict(line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return {each: [*_contract_problems(each, homes), *_imports(each, homes, moved)]
            for each in declarations}  # fmt: skip


def _home(homes: Sequence[Path], package: str) -> Path | None:
    """Return the folder with a package of the other version, None if it has none."""
    here = (home for home in homes if (home / package / "__init__.py").is_file())
    return next(here, None)


def _contract_problems(declaration: Declaration, homes: Sequence[Path]) -> Iterator[str]:
    contract = None if declaration.kind == "hooks" else _contract(declaration.kind)
    if contract is None:
        return
    package, *rest = contract.partition(":")[0].split(".")
    home = _home(homes, package)
    if home is None:
        return
    version = api_in(home.joinpath(package, *rest).with_suffix(".py"))
    stated = stated_api(declaration)
    if version is not None and stated is not None and not fits(stated, version):
        yield f"states api {stated}, the contract has {version}"


def _imports(
    declaration: Declaration, homes: Sequence[Path], moved: Mapping[str, str]
) -> Iterator[str]:
    """Yield the modules of modulm that the package's source imports and the other version lacks."""
    top = declaration.target.partition(":")[0].partition(".")[0]
    start = module_file(top)
    if start is None:
        return
    named = set()
    for file in sources(start.parent if start.name == "__init__.py" else start):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                named |= {f"{node.module}.{alias.name}" for alias in node.names}
    for name in sorted(named):
        package = name.partition(".")[0]
        home = _home(homes, package)
        if package == top or home is None:
            continue
        if target := new_name(name, moved):
            yield f"imports {name}, which is {'' if target.startswith('gone') else 'now '}{target}"
        elif not _exists(home, name):
            yield f"imports {name}, which does not exist"


def _exists(folder: Path, name: str) -> bool:
    """Whether a dotted name is a module, or may be a name in one."""
    path = folder.joinpath(*name.split("."))
    modules = (path.with_suffix(".py"), path / "__init__.py")
    parent = path.parent
    return any(map(Path.is_file, modules)) or any(
        _defines(file, path.name)
        for file in (parent.with_suffix(".py"), parent / "__init__.py")
        if file.is_file()
    )


def _defines(file: Path, name: str) -> bool:
    """Whether a module's source binds a name, or may do so when it is asked for."""
    tree = ast.parse(file.read_bytes())
    bound = {n.name for n in tree.body if hasattr(n, "name")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bool({name, "__getattr__", "*"} & bound) or name == "*"
