"""Keep the many packages of this repository alike: new KIND NAME, sync, bump VERSION, check.

A plugin folder plugins/<kind>/<name> holds its pyproject.toml and its package, nothing else.
`check` says what is not so, without importing anything; `sync` rewrites the keys that all
packages share from the root, and the root's extras from extras.toml; `bump` makes another version
the one of them all; `new` makes a folder from the template of `modulm plugins new`.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = [ROOT / "core", *(path.parent for path in sorted(ROOT.glob("core/*/*/pyproject.toml")))]
sys.path[:0] = map(str, _FOLDERS)

from modulm.errors import ModulmError  # noqa: E402
from modulm.plugins.kinds import HOOKS_GROUP, KINDS, KINDS_GROUP  # noqa: E402
from modulm_adapters.kinds import ADAPTER_RESOLVERS  # noqa: E402
from modulm_chat.kinds import CHAT_TEMPLATES  # noqa: E402
from modulm_distributed.kinds import COLLECTIVES  # noqa: E402
from modulm_media.kinds import MEDIA_FAMILIES  # noqa: E402
from modulm_server.kinds import ROUTES  # noqa: E402
from modulm_speech.kinds import TRANSCRIBERS  # noqa: E402

_BROUGHT = (
    ROUTES,
    CHAT_TEMPLATES,
    ADAPTER_RESOLVERS,
    COLLECTIVES,
    COLLECTIVES,
    COLLECTIVES,
    COLLECTIVES,
    MEDIA_FAMILIES,
    TRANSCRIBERS,
)
ALL_KINDS = {**KINDS, **{kind.name: kind for kind in _BROUGHT}}
#: What else is under core/: package -> the folders of plugins that may import it.
LIBRARIES: dict[str, set[str]] = {
    "modulm_adapters": {"adapter_resolvers", "routes"},
    "modulm_chat": {"chat_templates", "commands", "compat", "parsers", "poolers"},
    "modulm_cli": {"commands", "compat"},
    "modulm_distributed": {"executors", "collectives"},
    "modulm_fleet": set(),
    "modulm_frontend": {"commands", "compat", "hooks", "routes"},
    "modulm_gpu": {"platforms"},
    "modulm_layers": {"models", "poolers", "speculators"},
    "modulm_media": {"models", "routes", "transcribers"},
    "modulm_parsing": {"parsers", "routes", "commands", "models", "logits_processors"},
    "modulm_quantized": {"quantization", "commands"},
    "modulm_ray_serve": set(),
    "modulm_server": {"routes", "commands", "compat"},
    "modulm_speculation": {"speculators"},
    "modulm_speech": {"routes", "transcribers"},
    "modulm_tensor_files": {"loaders", "quantization", "commands"},
    "modulm_towers": {"models"},
}

#: Folder under plugins/ -> (what its distributions are called after "modulm-", its groups).
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
#: The folder of packages that answer to another program's names: a command, and files that are
#: installed beside the package.
COMPAT = "compat"
BUILD = {"requires": ["uv_build>=0.9,<1"], "build-backend": "uv_build"}
_REQUIREMENT = re.compile(r"^([\w-]+)(?:\[(.*?)\])?")
_BYPRODUCTS = ("__pycache__", "build", "dist")


def init_file() -> Path:
    """Where the code has the version."""
    return ROOT / "core/modulm/__init__.py"


def extras_file() -> Path:
    """What the extras of the root bring."""
    return ROOT / "tools/extras.toml"


@cache
def root() -> dict[str, Any]:
    """The root's project table: version, licence and Python range are its."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def bound(distribution: str = "modulm") -> str:
    """The range of the core's, or the server's, versions that a plugin of this version needs."""
    major, minor = (int(part) for part in root()["version"].split(".")[:2])
    return f"{distribution}>={major}.{minor},<{major}.{minor + 1}"


def plugins() -> list[Path]:
    """Every plugin folder."""
    return sorted(
        path for path in ROOT.glob("plugins/*/*") if path.is_dir() and any(path.iterdir())
    )


def kernels() -> list[Path]:
    """Every folder of compiled or device kernels."""
    return sorted(path.parent for path in ROOT.glob("kernels/*/pyproject.toml"))


def libraries() -> list[Path]:
    """The folders of the distributions beside the core."""
    return sorted(path.parent for path in ROOT.glob("core/*/*/pyproject.toml"))


def shown(path: Path) -> str:
    """The path as it is printed."""
    return path.relative_to(ROOT).as_posix()


def check() -> Iterator[str]:
    """A sentence for everything that is not as it should be."""
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
    yield from check_root()
    everyone = set(packages.values())
    for folder, package in packages.items():
        yield from check_imports(folder, everyone - {package})


def distribution(folder: Path) -> str:
    """What the distribution in a folder has to be called."""
    prefix = FOLDERS.get(folder.parent.name, ("", set()))[0]
    return f"modulm-{prefix}{folder.name}".replace("_", "-")


def check_folder(folder: Path, package: str) -> Iterator[str]:
    """One plugin's folder, its pyproject.toml and its entry points."""
    where = shown(folder)
    if folder.parent.name not in FOLDERS:
        yield f"{where}: there is no kind {folder.parent.name!r}"
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


def check_tables(where: str, table: dict[str, Any], compat: bool = False) -> Iterator[str]:
    """No unknown keys; the build backend that all pure packages have."""
    for key in sorted(set(table) - TABLES):
        yield f"{where}/pyproject.toml: unknown table [{key}]"
    for key in sorted(set(table.get("project", {})) - PROJECT - ({"scripts"} if compat else set())):
        yield f"{where}/pyproject.toml: unknown key project.{key}"
    build = table.get("tool", {}).get("uv", {}).get("build-backend", {})
    data = {"data": build["data"]} if compat and "data" in build else {}
    if table.get("tool") != {"uv": {"build-backend": {"module-root": "", **data}}}:
        yield f'{where}/pyproject.toml: the only tool table is [tool.uv.build-backend], "" as root'
    if table.get("build-system") != BUILD:
        yield f"{where}/pyproject.toml: build-system differs; run tools/workspace.py sync"


def check_shared(folder: Path, project: dict[str, Any]) -> Iterator[str]:
    """Name by rule; version, licence, Python range and core bound as everywhere."""
    where = f"{shown(folder)}/pyproject.toml"
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
    """Entry points: groups that exist and belong here, targets that are in the package."""
    where = f"{shown(folder)}/pyproject.toml"
    known = {kind.group for kind in ALL_KINDS.values()} | {HOOKS_GROUP, KINDS_GROUP}
    own = {ALL_KINDS[kind].group for kind in kinds}
    groups = project.get("entry-points", {})
    if not groups and not project.get("scripts"):
        yield f"{where}: offers nothing"
    if own and not own & set(groups):
        yield f"{where}: offers nothing in {' or '.join(sorted(own))}"
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
    """Names that a module binds at its top level."""
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
    """No plugin imports another one; what imports a library may, and depends on it."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    needed = project.get("dependencies", [])
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for package in (module.partition(".")[0] for module in modules):
                where = f"{shown(path)}:{node.lineno}"
                if package in others:
                    yield f"{where}: imports another plugin, {package}"
                allowed, library = LIBRARIES.get(package), bound(package.replace("_", "-"))
                if allowed is not None and folder.parent.name not in allowed:
                    yield f"{where}: imports {package}, which only {sorted(allowed)} may"
                elif allowed is not None and library not in needed:
                    yield f"{where}: needs the dependency {library!r}"


def check_root() -> Iterator[str]:
    """The version in the code, and the extras, which bring every package."""
    if (
        init_file().exists()
        and f'__version__ = "{root()["version"]}"' not in init_file().read_text()
    ):
        yield f"{shown(init_file())}: not version {root()['version']}; run sync"
    if not extras_file().exists():
        return
    named = tomllib.loads(extras_file().read_text())
    models = {name for group in named["models"].values() for name in group}
    devices = {folder for group in named["devices"].values() for folder in group}
    for folder in plugins() + kernels():
        where, kind = shown(folder), folder.parent.name
        if kind == "models" and folder.name not in models:
            yield f"{where}: in no group of [models] in tools/extras.toml"
        if kind in ("platforms", "kernels", "attention") and where not in devices:
            yield f"{where}: in no group of [devices] in tools/extras.toml"
    if root().get("optional-dependencies") != extras():
        yield "pyproject.toml: the extras differ from tools/extras.toml; run sync"
    for name in sorted(everything() - brought("all")):
        yield f"{name}: no extra brings it; name it under [apart] in tools/extras.toml"


def extras() -> dict[str, list[str]]:
    """Extra -> requirements, as tools/extras.toml has them."""
    named = tomllib.loads(extras_file().read_text())
    models: dict[str, list[str]] = {
        group: [distribution(ROOT / "plugins/models" / name) for name in names]
        for group, names in named["models"].items()
    }
    devices: dict[str, list[str]] = {
        device: [_name_of(ROOT / folder) for folder in folders]
        for device, folders in named["devices"].items()
    }
    chosen = {name for group in (*models.values(), *devices.values()) for name in group}
    chosen |= {name for group in named["apart"].values() for name in group}
    rest = {distribution(path) for path in plugins() if path.parent.name != "models"} - chosen
    serve = ["modulm-server", *rest, *models.pop("serve", ()), *devices.pop("any", ())]
    found = {"serve": _bounded(serve), **{name: _bounded(group) for name, group in models.items()}}
    found["models"] = [f"modulm[{','.join(sorted(models))}]"]
    for device, names in devices.items():
        found[f"{device}-base"] = ["modulm[serve]", *_bounded(names)]
        found[device] = [f"modulm[{device}-base,models]"]
    found |= {extra: _bounded(names) for extra, names in named["apart"].items()}
    whole = sorted([*devices, *named["apart"]])
    found["all"] = [f"modulm[{','.join(whole)}]", *named["libraries"]["all"]]
    return found


def _name_of(folder: Path) -> str:
    """What a folder's distribution is called."""
    if folder.is_relative_to(ROOT / "plugins"):
        return distribution(folder)
    return f"modulm-kernels-{folder.name}".replace("_", "-")


def _bounded(names: Iterable[str]) -> list[str]:
    """Requirements of this version of our packages."""
    return [bound(name) for name in sorted(set(names))]


def everything() -> set[str]:
    """All distributions of this repository but the core's."""
    return {project(folder)["name"] for folder in plugins() + kernels() + libraries()}


def project(folder: Path) -> dict[str, Any]:
    """A folder's project table."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


def brought(extra: str) -> set[str]:
    """The distributions of this repository that an extra of the root brings, directly or not."""
    tables = {project(f)["name"]: project(f) for f in plugins() + kernels() + libraries()}
    offered, found, wanted = extras(), set(), [f"modulm[{extra}]"]
    while wanted:
        name, chosen = _REQUIREMENT.findall(wanted.pop())[0]
        if name == "modulm":
            wanted += [line for key in chosen.split(",") for line in offered.get(key, ())]
        elif name in tables and name not in found:
            found.add(name)
            wanted += tables[name].get("dependencies", [])
    return found


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
    head, found, rest = path.read_text().partition("[project.optional-dependencies]\n")
    if found:
        rest = rest[rest.index("\n[") + 1 :]
    else:
        head, found, rest = path.read_text().partition("[project.scripts]\n")
        rest = found + rest
    rewrite(path, head + table + rest)
    root.cache_clear()


def rewrite(path: Path, text: str) -> None:
    """Write a file that changes, and say so."""
    if text != path.read_text():
        path.write_text(text)
        print(f"changed {shown(path)}")


def bump(version: str) -> None:
    """Make a version the one of all packages. Raises SystemExit for what is no version."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"workspace: {version!r} is no version such as 1.2.3")
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
            text, found = re.subn(rf"(?m)^{key} = .*$", line, text, count=1)
            if not found:
                text = re.sub(r"(?m)^(description = .*)$", rf"\1\n{line}", text, count=1)
        for name in ("modulm", *(library.replace("_", "-") for library in LIBRARIES)):
            text = re.sub(rf'"{name}\s*[<>=][^"]*"', f'"{bound(name)}"', text)
        if folder.is_relative_to(ROOT / "plugins"):
            text = re.sub(r"(?m)^requires = .*$", f'requires = ["{BUILD["requires"][0]}"]', text)
        rewrite(path, text)
    sync_root()


def new(kind: str, name: str) -> None:
    """A plugin folder in this repository, its test under tests/plugins."""
    sys.path.insert(0, str(ROOT / "plugins/commands/plugins"))
    from modulm_command_plugins.template import names_of, rendered

    names = names_of(kind, name)
    home = "parsers" if kind in ("tool_parsers", "reasoning_parsers") else kind
    folder = ROOT / "plugins" / home / name.lower().replace("-", "_")
    for path, content in rendered(names).items():
        test = path.startswith("tests/")
        target = ROOT / "tests/plugins" / home / Path(path).name if test else folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content.partition("\n[tool.pytest")[0])
        print(f"wrote {shown(target)}")
    sync()


def main(arguments: list[str]) -> int:
    """Run one verb; `check` gives 1 if anything is wrong."""
    match arguments:
        case ["check"]:
            found = list(check())
            print(*found, sep="\n", end="\n" if found else "")
            return 1 if found else 0
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
