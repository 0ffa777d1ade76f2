"""Package templates for `modulm plugins new`: the files in this folder, with names filled in."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from attrs import evolve, frozen

import modulm
from modulm.errors import ConfigError, UnsupportedError
from modulm.plugins.index import normalized
from modulm.plugins.kinds import HOOKS_GROUP, Kind, find_kind, kind_names
from modulm_command_plugins.static_api import contract_version

__all__ = ["Names", "add", "names_of", "render", "rendered", "templates"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([_-][A-Za-z0-9]+)*")
_HOOKS = Kind("hooks", "hook plugin", "hooks")
#: Suffix of the entry point, if it is not the kind's class.
_ATTRIBUTE = {
    "hooks": "",
    "commands": ":command",
    "chat_templates": ":TEMPLATE",
    "ops": ":$name",
    "worker_functions": ":$name",
}
_CLASS = {
    "models": "ForCausalLM",
    "attention": "Attention",
    "quantization": "Method",
    "platforms": "Platform",
    "tool_parsers": "ToolParser",
    "reasoning_parsers": "ReasoningParser",
    "schedulers": "Policy",
    "logits_processors": "Processor",
    "grammars": "Backend",
    "loaders": "Loader",
    "tokenizers": "Loader",
    "speculators": "Speculator",
    "executors": "Executor",
    "kv_connectors": "Connector",
    "step_parts": "Part",
    "adapters": "Bank",
    "adapter_resolvers": "Resolver",
    "routes": "Routes",
    "io_processors": "Processor",
    "stat_loggers": "Logger",
    "transcribers": "Transcriber",
    "speakers": "Speaker",
    "media_families": "Family",
    "kernels": "Kernels",
    "poolers": "Pooler",
    "checkpoints": "Checkpoint",
    "flags": "Flags",
    "collectives": "Collectives",
    "weight_transfer": "Backend",
}
#: Suffix of the driver's name, for kinds whose drivers have the name of an architecture.
_ARCHITECTURE = {
    "models": "ForCausalLM",
    "transcribers": "ForConditionalGeneration",
    "speakers": "ForConditionalGeneration",
    "media_families": "ForConditionalGeneration",
}
#: Libraries that packages of a kind depend on besides modulm.
_WITH = {
    "models": ("modulm-layers",),
    "tool_parsers": ("modulm-parsing",),
    "reasoning_parsers": ("modulm-parsing",),
    "tokenizers": ("modulm-tokenizers",),
    "grammars": ("modulm-structured-output",),
    "speculators": ("modulm-speculation",),
    "adapter_resolvers": ("modulm-adapters",),
    "routes": ("modulm-server",),
    "io_processors": ("modulm-server",),
    "stat_loggers": ("modulm-server",),
    "transcribers": ("modulm-speech", "modulm-tokenizers"),
    "speakers": ("modulm-speakers", "modulm-tokenizers"),
    "media_families": ("modulm-media",),
    "chat_templates": ("modulm-chat",),
    "collectives": ("modulm-distributed",),
    "weight_transfer": ("modulm-weight-transfer",),
}
#: Entry points besides the driver's: kind -> group and class suffix.
_MORE = dict.fromkeys(("adapter_resolvers", "stat_loggers"), ("modulm.flags", "Flags"))
#: What the flag of such a kind is called, after the driver's name.
_FLAG = {"adapter_resolvers": "table", "stat_loggers": "file"}
#: Kinds whose template writes files when it is used.
_WRITES = ("kv_connectors", "stat_loggers")
#: Files beside the module, by their suffixes; they have the driver's name.
_DATA = {"chat_templates": ".jinja"}
#: Files of every package, besides its own.
_COMMON = ("README.md", ".github/workflows/test.yml", ".github/workflows/publish.yml")


@frozen
class Names:
    """The names in a plugin's files.

    `driver`: the name that users type. `stem`: prefix of class names.
    """

    kind: str
    group: str
    driver: str
    stem: str
    distribution: str
    package: str


def templates() -> tuple[str, ...]:
    """Kinds that have a template."""
    folder = files(__name__)
    return tuple(kind for kind in ("hooks", *kind_names()) if folder.joinpath(kind).is_dir())


def names_of(kind: str, name: str) -> Names:
    """Derive all names from a kind and a name.

    The name of a model, transcriber or media family is its family or architecture; the model of
    family "foo" is called FooForCausalLM. Raises UnsupportedError for a kind without a template,
    ConfigError for an invalid name.
    """
    known = _HOOKS if kind == "hooks" else find_kind(kind)
    if kind not in templates():
        raise UnsupportedError(
            f"no template for {known.name} yet; there are {', '.join(templates())}; "
            "the pages in docs/ have an example for most kinds"
        )
    if not _NAME.fullmatch(name):
        raise ConfigError("name", f"{name!r}: use letters, digits and single hyphens")
    stem = "".join(part[:1].upper() + part[1:] for part in re.split("[-_]", name))
    driver = name
    if kind in _ARCHITECTURE:
        stem = stem.removesuffix(_ARCHITECTURE[kind])
        driver = stem + _ARCHITECTURE[kind]
    base = stem if kind in _ARCHITECTURE else name
    prefix = f"modulm-{known.short}-" if known.short else "modulm-"
    distribution = prefix + base.lower().replace("_", "-")
    group = HOOKS_GROUP if kind == "hooks" else known.group
    return Names(kind, group, driver, stem, distribution, distribution.replace("-", "_"))


def _contracts(kind: str) -> str:
    """The line of a manifest about the contract of a kind; "" if it has none."""
    version = contract_version(kind)
    return "" if version is None else f"{kind} = [{version}, {version}]\n"


def _range() -> str:
    """The range of modulm versions that a new package depends on."""
    major, minor = modulm.__version__.split(".")[:2]
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def rendered(names: Names, *, common: bool = True) -> dict[str, str]:
    """Render all files: path inside the package's folder -> content.

    common: with those that every repository of its own needs (README, CI, publishing).
    """
    attribute = _ATTRIBUTE.get(names.kind, f":{names.stem}{_CLASS.get(names.kind, '')}")
    attribute = attribute.replace("$name", names.driver.replace("-", "_"))
    needed = ["modulm", *_WITH.get(names.kind, ())]
    more_group, suffix = _MORE.get(names.kind, ("", ""))
    table = f'\n[project.entry-points."{more_group}"]\n'
    line = f'{names.driver} = "{names.package}:{names.stem}{suffix}"\n'
    values = {
        "kind": names.kind,
        "group": names.group,
        "driver": names.driver,
        "stem": names.stem,
        "distribution": names.distribution,
        "package": names.package,
        "target": names.package + attribute,
        "dependencies": ", ".join(f'"{name}{_range()}"' for name in needed),
        "modulm_version": ".".join(modulm.__version__.split(".")[:2]),
        "contracts": _contracts(names.kind),
        "files": '["*"]' if names.kind in _WRITES else "[]",
        "groups": f'\n[dependency-groups]\ntest = ["pytest-modulm{_range()}"]\n' if common else "",
        "more": table + line if more_group else "",
        "name": names.driver.replace("-", "_"),
        "flag": f"{names.driver.replace('_', '-')}-{_FLAG.get(names.kind, '')}",
    }
    folder = files(__name__)
    sources = {
        "pyproject.toml": folder.joinpath("pyproject.toml.txt"),
        f"{names.package}/__init__.py": folder.joinpath(names.kind, "package.py.txt"),
        f"tests/test_{names.package}.py": folder.joinpath(names.kind, "test.py.txt"),
    }
    shared = _COMMON if common else ()
    sources |= {path: folder.joinpath("common", f"{Path(path).name}.txt") for path in shared}
    if common:
        sources[f"{names.package}/modulm.toml"] = folder.joinpath("common", "modulm.toml.txt")
    if data := _DATA.get(names.kind):
        sources[f"{names.package}/{names.driver}{data}"] = folder.joinpath(
            names.kind, f"data{data}.txt"
        )
    fits = folder.joinpath(names.kind, "fits.toml.txt")
    if fits.is_file():
        sources[f"{names.package}/fits.toml"] = fits
    return {path: _fill(source, values) for path, source in sources.items()}


def add(kind: str, name: str, folder: Path) -> list[Path]:
    """Write a further driver into the package in `folder`: a module, a test, an entry point.

    Returns the files that were written or changed. Raises ConfigError if the folder is no plugin
    package, or has the module or the entry point already; then nothing is written.
    """
    project = folder / "pyproject.toml"
    if not project.is_file():
        raise ConfigError(
            "into", f"{folder} has no pyproject.toml; `modulm plugins new` writes one"
        )
    text = project.read_text(encoding="utf-8")
    package = str(tomllib.loads(text)["project"]["name"]).replace("-", "_")
    if not (folder / package / "__init__.py").is_file():
        raise ConfigError("into", f"{folder} has no package {package}")
    names = names_of(kind, name)
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    names = evolve(names, package=f"{package}.{module}")
    files = rendered(names, common=False)
    written = {
        folder / package / f"{module}.py": files[f"{names.package}/__init__.py"],
        folder / "tests" / f"test_{module}.py": files[f"tests/test_{names.package}.py"],
    }
    if data := _DATA.get(kind):
        file = f"{names.driver}{data}"
        written[folder / package / file] = files[f"{names.package}/{file}"]
    for path in written:
        if path.exists():
            raise ConfigError("name", f"{path} already exists")
    points = tomllib.loads(files["pyproject.toml"])["project"]
    for group, targets in points["entry-points"].items():
        for driver, target in targets.items():
            text = _with_entry_point(text, group, driver, target)
    written[project] = _with_dependencies(text, points["dependencies"])
    if fits := files.get(f"{names.package}/fits.toml"):
        table = folder / package / "fits.toml"
        known = table.read_text(encoding="utf-8").rstrip() + "\n\n" if table.is_file() else ""
        written[table] = known + fits
    manifest = folder / package / "modulm.toml"
    if manifest.is_file() and (line := _contracts(kind)):
        stated = manifest.read_text(encoding="utf-8")
        table = "[contracts]\n"
        if table in stated and kind not in tomllib.loads(stated)["contracts"]:
            written[manifest] = stated.replace(table, table + line, 1)
    for path, content in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return list(written)


def _with_entry_point(text: str, group: str, name: str, target: str) -> str:
    """Add an entry point to a pyproject.toml. Raises ConfigError if the name is there."""
    known = tomllib.loads(text)["project"].get("entry-points", {}).get(group)
    if known is None:
        return f'{text.rstrip()}\n\n[project.entry-points."{group}"]\n{name} = "{target}"\n'
    if name in known:
        raise ConfigError("name", f"the package already has {name!r} in {group!r}")
    header = re.search(rf'^\[project\.entry-points\."?{re.escape(group)}"?\][ \t]*\n', text, re.M)
    if header is None:
        raise ConfigError("into", f"pyproject.toml: [project.entry-points.{group!r}] was not found")
    return f'{text[: header.end()]}{name} = "{target}"\n{text[header.end() :]}'


def _with_dependencies(text: str, needed: Sequence[str]) -> str:
    """Add missing dependencies to a pyproject.toml."""
    known = {_requirement(line) for line in tomllib.loads(text)["project"].get("dependencies", [])}
    missing = [f'"{line}"' for line in needed if _requirement(line) not in known]
    start = re.search(r"^dependencies = \[[ \t]*", text, re.M)
    if not missing:
        return text
    if start is None:
        raise ConfigError("into", f"pyproject.toml: add the dependencies {', '.join(missing)}")
    comma = ", " if known else ""
    return text[: start.end()] + ", ".join(missing) + comma + text[start.end() :]


def _requirement(line: str) -> str:
    match = re.match(r"[\w.-]+", line)
    return normalized(match.group()) if match else line


def _fill(source: Traversable, values: dict[str, str]) -> str:
    return Template(source.read_text(encoding="utf-8")).substitute(values)


def render(kind: str, name: str, into: Path) -> Path:
    """Write the package's folder inside `into` and return it.

    Raises ConfigError if the folder exists.
    """
    names = names_of(kind, name)
    folder = into / names.distribution
    if folder.exists():
        raise ConfigError("name", f"{folder} already exists")
    for path, content in rendered(names).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
    (folder / names.package / "py.typed").touch()
    return folder
