"""Keep the packages of this repository consistent: new KIND NAME, sync, bump VERSION, check.

A plugin folder plugins/<kind>/<name> holds its pyproject.toml and its package, nothing else.
`check` lists problems without importing anything; `sync` rewrites the keys that all packages share
with the root, and the root's extras from extras.toml; `bump` changes the version of all packages;
`new` creates a folder from the template of `modulm plugins new`.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = [ROOT / "core", *(path.parent for path in sorted(ROOT.glob("core/*/*/pyproject.toml")))]
sys.path[:0] = map(str, (*_FOLDERS, ROOT / "tools"))

import manifests  # noqa: E402

from modulm.errors import ModulmError  # noqa: E402
from modulm.plugins.kinds import HOOKS_GROUP, KINDS, KINDS_GROUP, Kind  # noqa: E402


def libraries() -> list[Path]:
    """Return the folders of the distributions besides the core."""
    return sorted(path.parent for path in ROOT.glob("core/*/*/pyproject.toml"))


def project(folder: Path) -> dict[str, Any]:
    """Return a folder's project table."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


def _kinds() -> dict[str, Kind]:
    """Return every kind of driver by name: the core's and those that libraries declare."""
    kinds = dict(KINDS)
    for folder in libraries():
        points = project(folder).get("entry-points", {}).get(KINDS_GROUP, {})
        for target in points.values():
            module, _, attribute = target.partition(":")
            kind: Kind = getattr(import_module(module), attribute)
            kinds[kind.name] = kind
    return kinds


ALL_KINDS = _kinds()
#: Import package of a library -> its folder.
LIBRARIES = {project(folder)["name"].replace("-", "_"): folder for folder in libraries()}
#: Kinds of plugins that may import packages in `core/serving`.
SERVING = {"commands", "compat", "hooks", "routes"}

#: Folder under plugins/ -> (prefix of its distributions after "modulm-", its kinds).
FOLDERS: dict[str, tuple[str, set[str]]] = {
    "models": ("", {"models", "checkpoints", "media_families"}),
    "parsers": ("parser-", {"tool_parsers", "reasoning_parsers"}),
    "hooks": ("hooks-", set()),
    "compat": ("", set()),
    **{
        kind.name: (f"{kind.short}-", {kind.name})
        for kind in ALL_KINDS.values()
        if kind.name not in ("models", "tool_parsers", "reasoning_parsers")
    },
}
#: Keys of a plugin's pyproject.toml; anything else belongs to the root.
TABLES = {"build-system", "project", "tool"}
PROJECT = {
    "name",
    "version",
    "description",
    "license",
    "requires-python",
    "dependencies",
    "optional-dependencies",
    "entry-points",
}
#: Folder of packages that provide another program's names: a command, and modules installed beside
#: the package.
COMPAT = "compat"
BUILD = {"requires": ["uv_build>=0.9,<1"], "build-backend": "uv_build"}
_REQUIREMENT = re.compile(r"^([\w-]+)(?:\[(.*?)\])?")
_BYPRODUCTS = ("__pycache__", "build", "dist")


def init_file() -> Path:
    """Return the file with the version."""
    return ROOT / "core/modulm/__init__.py"


def extras_file() -> Path:
    """Return the file that defines the root's extras."""
    return ROOT / "tools/extras.toml"


@cache
def root() -> dict[str, Any]:
    """Return the root's project table, which defines version, licence and Python range."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def bound(distribution: str = "modulm") -> str:
    """Return the version range of the core or of a library that a plugin requires."""
    major, minor = (int(part) for part in root()["version"].split(".")[:2])
    return f"{distribution}>={major}.{minor},<{major}.{minor + 1}"


def plugins() -> list[Path]:
    """Return every plugin folder."""
    return sorted(
        path for path in ROOT.glob("plugins/*/*") if path.is_dir() and any(path.iterdir())
    )


def kernels() -> list[Path]:
    """Return every folder of compiled or device kernels."""
    return sorted(path.parent for path in ROOT.glob("kernels/*/pyproject.toml"))


def display(path: Path) -> str:
    """Return the path as it is printed."""
    return path.relative_to(ROOT).as_posix()


def check() -> Iterator[str]:
    """Yield a message for every problem."""
    packages = {folder: distribution(folder).replace("-", "_") for folder in plugins()}
    for folder, package in packages.items():
        yield from check_folder(folder, package)
    for folder in kernels():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        yield from check_shared(folder, project)
        yield from check_points(folder, project, {"kernels"})
    for folder in libraries():
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        yield from check_shared(folder, project)
        if "entry-points" in project:
            yield from check_points(folder, project, set())
    yield from check_manifests()
    yield from check_root()
    everyone = set(packages.values())
    for folder, package in packages.items():
        yield from check_imports(folder, everyone - {package})


def distribution(folder: Path) -> str:
    """Return the required name of the distribution in a folder."""
    if folder.parent.name == COMPAT and folder.name == "pytest":
        return "pytest-modulm"  # as pytest's plugins are called
    prefix = FOLDERS.get(folder.parent.name, ("", set()))[0]
    return f"modulm-{prefix}{folder.name}".replace("_", "-")


def check_folder(folder: Path, package: str) -> Iterator[str]:
    """Check a plugin's folder, its pyproject.toml and its entry points."""
    where = display(folder)
    if folder.parent.name not in FOLDERS:
        yield f"{where}: unknown kind {folder.parent.name!r}"
        return
    entries = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
    entries -= {name for name in entries if name in _BYPRODUCTS or name.endswith(".egg-info")}
    for name in sorted(entries - {"pyproject.toml", package}):
        yield f"{where}/{name}: a plugin folder holds pyproject.toml and {package}/ only"
    for name in sorted({"pyproject.toml", package} - entries):
        yield f"{where}/{name} is missing"
    if "pyproject.toml" not in entries:
        return
    table = tomllib.loads((folder / "pyproject.toml").read_text())
    yield from check_tables(where, table, folder.parent.name == COMPAT)
    yield from check_shared(folder, table.get("project", {}))
    yield from check_points(folder, table.get("project", {}), FOLDERS[folder.parent.name][1])


def package_of(folder: Path) -> str:
    """Return the import package of a folder's distribution."""
    name: str = project(folder)["name"]
    return name.replace("-", "_")


def check_manifests() -> Iterator[str]:
    """Check that each package states its contracts and needs."""
    for folder in plugins() + kernels() + libraries():
        if (folder / "pyproject.toml").is_file():
            found = manifests.problems(folder, package_of(folder), root()["version"])
            yield from (f"{display(folder)}: {problem}" for problem in found)


def sync_manifest(folder: Path) -> None:
    """Write a package's manifest, into pyproject.toml and beside its `__init__.py`."""
    manifest = manifests.synced(folder, root()["version"])
    path = folder / "pyproject.toml"
    rewrite(path, manifests.with_table(path.read_text(), manifest))
    path = folder / package_of(folder) / "modulm.toml"
    if path.parent.is_dir():
        path.touch()
        rewrite(path, manifests.text(manifest))


def check_tables(where: str, table: dict[str, Any], compat: bool = False) -> Iterator[str]:
    """Check for unknown keys and for the shared build backend."""
    for key in sorted(set(table) - TABLES):
        yield f"{where}/pyproject.toml: unknown table [{key}]"
    for key in sorted(set(table.get("project", {})) - PROJECT - ({"scripts"} if compat else set())):
        yield f"{where}/pyproject.toml: unknown key project.{key}"
    tools = {name: value for name, value in table.get("tool", {}).items() if name != "modulm"}
    build = tools.get("uv", {}).get("build-backend", {})
    data = {"data": build["data"]} if compat and "data" in build else {}
    if tools != {"uv": {"build-backend": {"module-root": "", **data}}}:
        yield (
            f"{where}/pyproject.toml: the only tool tables are [tool.uv.build-backend], "
            '"" as root, and [tool.modulm]'
        )
    if table.get("build-system") != BUILD:
        yield f"{where}/pyproject.toml: build-system differs; run tools/workspace.py sync"


def check_shared(folder: Path, project: dict[str, Any]) -> Iterator[str]:
    """Check the name, and that version, licence, Python range and core bound are the shared
    ones.
    """
    where = f"{display(folder)}/pyproject.toml"
    name = distribution(folder)
    if folder.parent.name == "kernels":
        name = f"modulm-kernels-{folder.name}"
    if project.get("name") != name:
        yield f"{where}: name is {project.get('name')!r}, not {name!r}"
    if not project.get("description"):
        yield f"{where}: no description"
    for key in ("version", "license", "requires-python"):
        if project.get(key) != root()[key]:
            yield f"{where}: {key} is {project.get(key)!r}, not {root()[key]!r}; run sync"
    if bound() not in project.get("dependencies", []):
        yield f"{where}: does not depend on {bound()!r}; run sync"


def check_points(folder: Path, project: dict[str, Any], kinds: set[str]) -> Iterator[str]:
    """Check entry points: groups must exist and fit the kind, targets must be in the package."""
    where = f"{display(folder)}/pyproject.toml"
    known = {kind.group for kind in ALL_KINDS.values()} | {HOOKS_GROUP, KINDS_GROUP}
    known |= {"pytest11"} if folder.parent.name == COMPAT else set()
    expected_groups = {ALL_KINDS[kind].group for kind in kinds}
    groups = project.get("entry-points", {})
    if not groups and not project.get("scripts"):
        yield f"{where}: declares no entry points"
    if expected_groups and not expected_groups & set(groups):
        yield f"{where}: declares no entry points in {' or '.join(sorted(expected_groups))}"
    for group, points in groups.items():
        if group not in known:
            yield f"{where}: unknown entry-point group {group!r}"
        for name, target in points.items():
            if not target_exists(folder, target):
                yield f"{where}: {name} = {target!r} is not in the package"


def target_exists(folder: Path, target: str) -> bool:
    """Whether "package.module:attribute" is defined in the folder, by its syntax tree."""
    module, _, attribute = target.partition(":")
    path = folder.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return False
    return not attribute or attribute in defined(ast.parse(file.read_text()))


def defined(tree: ast.Module) -> set[str]:
    """Return the names that a module binds at its top level."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
    return names


def check_imports(folder: Path, others: set[str]) -> Iterator[str]:
    """Check that no plugin imports another, and that imported libraries are dependencies."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    needed = project.get("dependencies", [])
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for package in (module.partition(".")[0] for module in modules):
                where = f"{display(path)}:{node.lineno}"
                if package in others:
                    yield f"{where}: imports another plugin, {package}"
                library, home = bound(package.replace("_", "-")), LIBRARIES.get(package)
                if home is None:
                    continue
                if home.parent.name == "serving" and folder.parent.name not in SERVING:
                    yield f"{where}: imports {package}, which only {sorted(SERVING)} may"
                elif library not in needed:
                    yield f"{where}: needs the dependency {library!r}"


def check_root() -> Iterator[str]:
    """Check the version in the code, and the extras, which must include every package."""
    if (
        init_file().exists()
        and f'__version__ = "{root()["version"]}"' not in init_file().read_text()
    ):
        yield f"{display(init_file())}: not version {root()['version']}; run sync"
    if not extras_file().exists():
        return
    table = tomllib.loads(extras_file().read_text())
    models = {name for group in table["models"].values() for name in group}
    devices = {folder for group in table["devices"].values() for folder in group}
    for folder in plugins() + kernels():
        where, kind = display(folder), folder.parent.name
        if kind == "models" and folder.name not in models:
            yield f"{where}: in no group of [models] in tools/extras.toml"
        if kind in ("platforms", "kernels", "attention") and where not in devices:
            yield f"{where}: in no group of [devices] in tools/extras.toml"
    yield from (f"pyproject.toml: {key} differs; run sync" for key in unsynced_mypy())
    if root().get("optional-dependencies") != extras():
        yield "pyproject.toml: the extras differ from tools/extras.toml; run sync"
    for name in sorted(everything() - brought("all")):
        yield f"{name}: no extra brings it; name it under [apart] in tools/extras.toml"


def mypy_keys() -> dict[str, str]:
    """Return the keys of [tool.mypy] that list packages: core, libraries, routes and vLLM's
    names.
    """
    folders = [*libraries(), *(f for f in plugins() if f.parent.name in ("routes", COMPAT))]
    names = sorted(project(folder)["name"].replace("-", "_") for folder in folders)
    listed = ", ".join(f'"{name}"' for name in ("modulm", *names))
    paths = ":".join(["core", *(display(folder) for folder in folders)])
    return {"packages": f"packages = [{listed}]", "mypy_path": f'mypy_path = "{paths}"'}


def unsynced_mypy() -> list[str]:
    """Return the keys of [tool.mypy] that differ from `mypy_keys`."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    table = [line for line in lines if line.startswith(("packages = ", "mypy_path = "))]
    return [key for key, line in mypy_keys().items() if table and line not in table]


def extras() -> dict[str, list[str]]:
    """Return extra -> requirements, from tools/extras.toml."""
    table = tomllib.loads(extras_file().read_text())
    models: dict[str, list[str]] = {
        group: [distribution(ROOT / "plugins/models" / name) for name in names]
        for group, names in table["models"].items()
    }
    devices: dict[str, list[str]] = {
        device: [_name_of(ROOT / folder) for folder in folders]
        for device, folders in table["devices"].items()
    }
    chosen = {name for group in (*models.values(), *devices.values()) for name in group}
    chosen |= {name for group in table["apart"].values() for name in group}
    rest = {distribution(path) for path in plugins() if path.parent.name != "models"} - chosen
    serve = ["modulm-server", *rest, *models.pop("serve", ()), *devices.pop("any", ())]
    requirements = {
        "serve": _bounded(serve),
        **{name: _bounded(group) for name, group in models.items()},
    }
    requirements["models"] = [f"modulm[{','.join(sorted(models))}]"]
    for device, names in devices.items():
        requirements[f"{device}-base"] = ["modulm[serve]", *_bounded(names)]
        requirements[device] = [f"modulm[{device}-base,models]"]
    requirements |= {extra: _bounded(names) for extra, names in table["apart"].items()}
    whole = sorted([*devices, *table["apart"]])
    requirements["all"] = [f"modulm[{','.join(whole)}]", *table["libraries"].pop("all")]
    requirements |= table["libraries"]
    return requirements


def _name_of(folder: Path) -> str:
    """Return the name of a folder's distribution."""
    if folder.is_relative_to(ROOT / "plugins"):
        return distribution(folder)
    return f"modulm-kernels-{folder.name}".replace("_", "-")


def _bounded(names: Iterable[str]) -> list[str]:
    """Return requirements of this version of our packages."""
    return [bound(name) for name in sorted(set(names))]


def everything() -> set[str]:
    """Return all distributions of this repository except the core's."""
    return {project(folder)["name"] for folder in plugins() + kernels() + libraries()}


def brought(extra: str) -> set[str]:
    """Return the distributions of this repository that an extra of the root includes, directly or
    not.
    """
    tables = {project(f)["name"]: project(f) for f in plugins() + kernels() + libraries()}
    offered, included, pending = extras(), set(), [f"modulm[{extra}]"]
    while pending:
        name, chosen = _REQUIREMENT.findall(pending.pop())[0]
        if name == "modulm":
            pending += [line for key in chosen.split(",") for line in offered.get(key, ())]
        elif name in tables and name not in included:
            included.add(name)
            pending += tables[name].get("dependencies", [])
    return included


def sync_root() -> None:
    """Write the version into the code, and the extras into the root's pyproject.toml."""
    version = f'__version__ = "{root()["version"]}"'
    if init_file().exists():
        rewrite(init_file(), re.sub(r'(?m)^__version__ = ".*"$', version, init_file().read_text()))
    if not extras_file().exists():
        return
    lines = ["# written by tools/workspace.py sync, from tools/extras.toml"]
    for name, requirements in extras().items():
        if len(requirements) == 1:
            lines.append(f'{name} = ["{requirements[0]}"]')
        else:
            lines += [f"{name} = [", *(f'  "{each}",' for each in requirements), "]"]
    table = "[project.optional-dependencies]\n" + "\n".join(lines) + "\n\n"
    path = ROOT / "pyproject.toml"
    head, marker, rest = path.read_text().partition("[project.optional-dependencies]\n")
    if marker:
        rest = rest[rest.index("\n[") + 1 :]
    else:
        head, marker, rest = path.read_text().partition("[project.scripts]\n")
        rest = marker + rest
    text = head + table + rest
    for key, line in mypy_keys().items():
        text = re.sub(rf"(?m)^{key} = .*$", line, text, count=1)
    rewrite(path, text)
    root.cache_clear()


def rewrite(path: Path, text: str) -> None:
    """Write a file if its text changes, and print its path."""
    if text != path.read_text():
        path.write_text(text)
        print(f"changed {display(path)}")


def bump(version: str) -> None:
    """Set the version of all packages. Raises SystemExit for an invalid version."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"workspace: {version!r} is not a version such as 1.2.3")
    path = ROOT / "pyproject.toml"
    rewrite(
        path, re.sub(r"(?m)^version = .*$", f'version = "{version}"', path.read_text(), count=1)
    )
    root.cache_clear()
    sync()


def sync() -> None:
    """Rewrite the shared keys of every package, and the root's extras."""
    for folder in plugins() + kernels() + libraries():
        path = folder / "pyproject.toml"
        text = path.read_text()
        for key in ("version", "license", "requires-python"):
            line = f'{key} = "{root()[key]}"'
            text, replaced = re.subn(rf"(?m)^{key} = .*$", line, text, count=1)
            if not replaced:
                text = re.sub(r"(?m)^(description = .*)$", rf"\1\n{line}", text, count=1)
        for name in ("modulm", *(library.replace("_", "-") for library in LIBRARIES)):
            text = re.sub(rf'"{name}\s*[<>=][^"]*"', f'"{bound(name)}"', text)
        if folder.is_relative_to(ROOT / "plugins"):
            text = re.sub(r"(?m)^requires = .*$", f'requires = ["{BUILD["requires"][0]}"]', text)
        rewrite(path, text)
        sync_manifest(folder)
    sync_root()


def new(kind: str, name: str) -> None:
    """Create a plugin folder in this repository, with its test under tests/plugins."""
    sys.path.insert(0, str(ROOT / "plugins/commands/plugins"))
    from modulm_command_plugins.template import names_of, rendered

    names = names_of(kind, name)
    home = "parsers" if kind in ("tool_parsers", "reasoning_parsers") else kind
    folder = ROOT / "plugins" / home / name.lower().replace("-", "_")
    for path, content in rendered(names, common=False).items():
        test = path.startswith("tests/")
        target = ROOT / "tests/plugins" / home / Path(path).name if test else folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content.partition("\n[tool.pytest")[0])
        print(f"wrote {display(target)}")
    sync()


def main(arguments: list[str]) -> int:
    """Run a command; `check` returns 1 if there are problems."""
    match arguments:
        case ["check"]:
            problems = list(check())
            print(*problems, sep="\n", end="\n" if problems else "")
            return 1 if problems else 0
        case ["sync"]:
            sync()
            return 0
        case ["bump", version]:
            bump(version)
            return 0
        case ["new", kind, name]:
            try:
                new(kind, name)
            except ModulmError as error:
                print(f"workspace: {error}", file=sys.stderr)
                return 2
            return 0
    print("usage: tools/workspace.py check | sync | bump VERSION | new KIND NAME")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
