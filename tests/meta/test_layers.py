"""Imports go one way, read from the syntax trees: nothing is imported to find out."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from syntax_trees import syntax_tree

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "modulm": ROOT / "core/modulm",
    **{
        f"modulm_{path.name.replace('-', '_')}": path / f"modulm_{path.name.replace('-', '_')}"
        for path in sorted([*ROOT.glob("core/libs/*"), *ROOT.glob("core/serving/*")])
        if (path / "pyproject.toml").exists()
    },
}
CORE = PACKAGES["modulm"]

#: Lowest first: a module may import from its own layer and from those before it.
LAYERS = (
    ("errors", "structure"),
    ("contracts",),
    ("plugins",),
    ("config",),
    ("ops", "parallel"),
    ("nn", "loading"),
    ("engine",),
    ("cli", "parsing", "__main__"),
)
#: The rooms of modulm.engine in the order of the flow, and the modules on top of them.
ROOMS = (
    ("parts",),
    ("kv_cache",),
    ("scheduling",),
    ("sampling",),
    ("worker",),
    ("core",),
)


def needs(package: str) -> set[str]:
    """Packages of `core/` that a distribution depends on, from its pyproject.toml."""
    path = PACKAGES[package].parent / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    names = {re.split(r"[<>=]", line)[0].replace("-", "_") for line in project["dependencies"]}
    return names & PACKAGES.keys()


#: Package -> the others of `core/` that it is written with; none for the core itself.
NEEDS = {name: set() if name == "modulm" else needs(name) for name in PACKAGES}
LIBRARIES = {name for name, path in PACKAGES.items() if path.parent.parent.name == "libs"}
#: The server: what route packages import, then the application, then the process.
SERVER = (
    ("absent_fields", "directory", "engine", "first_request", "flags", "heap", "kinds", "openapi",
     "output", "prompts", "rendering", "running_requests"),
    ("api_keys", "auth", "constraints", "errors", "hosted_tools", "hosts", "json_body",
     "key_limits", "logprobs", "io_processor", "logs", "loop_watch", "loopback",
     "media_service", "memory_metrics", "metrics", "pacing", "page_files", "paging",
     "prompt_caching", "prompt_embeds", "request_cost", "request_guard",
     "request_log", "sampling", "sse", "stat_logger", "stats_log", "text_work", "tool_servers",
     "transfer"),
    ("generation",),
    ("chat_turn", "forced_calls", "hosted_turns", "route", "speech_output"),
    ("isolated_routes",),
    ("protocol", "websocket_protocol"),
    ("app",),
    ("api_workers", "headless", "serve"),
    ("models",),
    ("api_worker", "command", "kits", "scripted", "testing"),
)  # fmt: skip
#: Of the whole core's use: not on any layer.
OUTSIDE = ("modulm.testing", "modulm.__init__")
#: (importing module, imported module): lazy, and with the reason.
EXCEPTIONS = {
    # The process-wide manager reads the environment's selection on first use.
    ("modulm.plugins.manager", "modulm.config.environ"),
    # Lazy: without the package, no engine publishes events.
    ("modulm_server.engine.cache_events", "modulm_kv_events.subscriber"),
    # Public names, for type checkers; who uses them without the package is told what to install.
    ("modulm", "modulm_frontend.beam_search"),
    ("modulm", "modulm_frontend.llm"),
    ("modulm", "modulm_frontend.lora"),
    ("modulm", "modulm_server.engine.async_llm"),
}


def level_of(module: str, layers: tuple[tuple[str, ...], ...], prefix: str) -> int | None:
    """The level of a module by its name's part after `prefix`; None outside of it."""
    if not module.startswith(f"{prefix}."):
        return None
    part = module.removeprefix(f"{prefix}.").partition(".")[0]
    found = [level for level, names in enumerate(layers) if part in names]
    assert found, f"{module} is on no layer of {prefix}"
    return found[0]


def modules() -> dict[str, Path]:
    """Name -> file of everything in the core and the server, packages by their own name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()
LAYERED = [name for name in MODULES if "." in name and not name.startswith(OUTSIDE)]


@cache
def imports(path: Path) -> tuple[str, ...]:
    """The modules that a file imports anywhere, those for types included.

    `from package import module` is the module.
    """
    found: list[str] = []
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.append(module if module in MODULES else node.module or "")
    return tuple(found)


def test_imports_go_down() -> None:
    """Through the layers, the rooms of the engine and the modules of the server; types too."""
    upward = [f"{name} imports {other}" for name in LAYERED for other in imports_above(name)]
    assert not upward, "imports of what is above:\n" + "\n".join(upward)


def imports_above(name: str) -> Iterator[str]:
    """What a module imports from a higher level than its own."""
    for imported in imports(MODULES[name]):
        if (
            imported not in MODULES
            or (name, imported) in EXCEPTIONS
            or imported.startswith(OUTSIDE)
        ):
            continue
        for layers, prefix in (
            (LAYERS, "modulm"),
            (ROOMS, "modulm.engine"),
            (SERVER, "modulm_server"),
        ):
            own, other = level_of(name, layers, prefix), level_of(imported, layers, prefix)
            if own is not None and other is not None and other > own:
                yield imported


def test_no_circle_of_imports() -> None:
    """Not even one that only types close."""
    graph = {
        name: {found for found in imports(path) if found in MODULES and found != name}
        for name, path in MODULES.items()
    }
    assert not circles(graph)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach one another."""
    reach = {name: set(targets) for name, targets in graph.items()}
    for middle in graph:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    rings = {
        frozenset(other for other in targets if name in reach[other])
        for name, targets in reach.items()
        if name in targets
    }
    return [set(ring) for ring in rings]


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set[str]()}
    assert circles(graph) == [{"a", "b", "c"}]


def test_core_and_server_import_no_plugin() -> None:
    foreign = {name: packages for name in MODULES if (packages := foreign_packages(name))}
    assert not foreign


def foreign_packages(name: str) -> set[str]:
    """Packages of ours that a module imports and its distribution does not depend on."""
    own = name.partition(".")[0]
    others = (m for m in imports(MODULES[name]) if (name, m) not in EXCEPTIONS)
    packages = {module.partition(".")[0] for module in others}
    return {p for p in packages if p.startswith("modulm")} - NEEDS[own] - {own}


@pytest.mark.parametrize("package", sorted(NEEDS.keys() - {"modulm"}))
def test_a_distribution_imports_what_it_depends_on(package: str) -> None:
    names = [name for name in MODULES if name.partition(".")[0] == package]
    imported = {module.partition(".")[0] for name in names for module in imports(MODULES[name])}
    assert NEEDS[package] - {"modulm"} <= imported


def test_libraries_need_the_core_and_libraries_only() -> None:
    assert not {name for name in LIBRARIES if NEEDS[name] - LIBRARIES - {"modulm"}}
    assert not circles({name: set(others) for name, others in NEEDS.items()})


def test_contracts_import_no_torch() -> None:
    for path in (CORE / "contracts").glob("*.py"):
        top = {
            alias.name
            for node in syntax_tree(path).body
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert "torch" not in top, path.name


def installed_names() -> set[str]:
    """Names of architectures, formats, chips and parsers, from the plugins' own folders.

    "transformers" is the name of a library that the core uses, too.
    """
    families = {path.name for kind in ("models", "parsers") for path in folders(kind)}
    chips = {path.name for path in folders("platforms")} - {"cpu"}
    methods = {path.name for path in folders("quantization")} - {"none"}
    return families - {"demo", "transformers"} | chips | methods


def folders(kind: str) -> Iterator[Path]:
    return (path for path in (ROOT / "plugins" / kind).iterdir() if path.is_dir())


#: Start of a module's name -> names it may mention: words that users or checkpoints bring.
MENTIONS: dict[str, set[str]] = {
    # vLLM's names of flags and their values
    "modulm.contracts.config": {"cuda", "mamba", "cohere", "mistral", "fp8", "nvfp4"},
    "modulm.engine.kv_cache.sizing": {"mamba"},
    "modulm.loading.model": {"mamba", "fp8"},
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words(text: str) -> set[str]:
    """The words of an identifier or a sentence, and its identifiers as a whole."""
    return {word.lower() for word in _WORD.findall(text)} | set(re.findall(r"\w+", text.lower()))


def test_the_core_names_no_plugin() -> None:
    """Names of drivers come in as data; text for people (docstrings) may give examples."""
    names = installed_names()
    found = []
    for module in (name for name in LAYERED if name.startswith("modulm.")):
        allowed = {w for start, some in MENTIONS.items() if module.startswith(start) for w in some}
        for line, text in literals(MODULES[module]):
            if words(text) & (names - allowed):
                found.append(f"{module}:{line}: {text.strip()[:80]}")
    assert not found, "\n".join(found)


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """Identifiers and strings of a file, docstrings apart."""
    tree = syntax_tree(path)
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                yield node.lineno, text
            case ast.Name(id=text) | ast.Attribute(attr=text):
                yield node.lineno, text
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
                yield node.lineno, text


def test_the_architecture_page_names_every_room() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rooms = {f"`{path.name}/`" for path in CORE.iterdir() if (path / "__init__.py").exists()}
    rooms |= {f"`{name}/`" for layer in ROOMS for name in layer}
    distributions = {f"`{package.replace('_', '-')}`" for package in NEEDS.keys() - {"modulm"}}
    assert not {name for name in rooms | distributions if name not in page}
