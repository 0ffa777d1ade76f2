"""Imports go one way, read from the syntax trees: nothing is imported to find out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core/modulm"

#: Lowest first: a module may import from its own layer and from those before it.
LAYERS = (
    ("errors",),
    ("contracts",),
    ("config.sources.plugin_selection",),
    ("plugins",),
    ("config",),
    ("ops", "parallel"),
    ("nn", "text", "loading"),
    ("parsing", "engine"),
    ("server",),
    (
        "cli",
        "__main__",
    ),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
#: Of the whole core's use: not on any layer.
OUTSIDE = {"testing", "__init__", "version"}
#: (importing module, imported name): lazy, and with the reason.
EXCEPTIONS = {
    # The process-wide manager reads the environment's selection on first use.
    ("plugins.manager", "modulm.config.sources"),
}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(CORE.rglob("*.py")):
        name = ".".join(path.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__")
        if name.partition(".")[0] not in OUTSIDE:
            yield name, path


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports when it runs, at whatever place."""
    tree = ast.parse(path.read_text())
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "modulm":
            yield from (f"modulm.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: str(value)[-40:])
def test_imports_go_down(name: str, path: Path) -> None:
    level = LEVEL[name.partition(".")[0]]
    for imported in imports(path):
        if not imported.startswith("modulm.") or (name, imported) in EXCEPTIONS:
            continue
        layer = imported.split(".")[1]
        if layer.startswith("__"):
            continue
        assert layer in LEVEL, f"{name} imports {imported}"
        assert LEVEL[layer] <= level, f"{name} imports {imported}, which is above it"


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: str(value)[-40:])
def test_the_core_imports_no_plugin(name: str, path: Path) -> None:
    assert not [module for module in imports(path) if module.startswith("modulm_")]


def test_contracts_import_no_torch() -> None:
    for path in (CORE / "contracts").glob("*.py"):
        top = {
            alias.name
            for node in ast.parse(path.read_text()).body
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
    # vLLM's names of flags
    "config.schema": {"cuda", "mamba", "cohere"},
    "engine.caches": {"mamba"},
    "loading.model": {"mamba"},
    # a value of `rope_type` in config.json, whoever's model it is
    "nn.rope": {"llama"},
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def words(text: str) -> set[str]:
    """The words of an identifier or a sentence, and its identifiers as a whole."""
    return {word.lower() for word in _WORD.findall(text)} | set(re.findall(r"\w+", text.lower()))


def test_the_core_names_no_plugin() -> None:
    """Names of drivers come in as data; text for people (docstrings) may give examples."""
    names = installed_names()
    found = []
    for module, path in modules():
        allowed = {w for start, some in MENTIONS.items() if module.startswith(start) for w in some}
        for line, text in literals(path):
            if words(text) & (names - allowed):
                found.append(f"{module}:{line}: {text.strip()[:80]}")
    assert not found, "\n".join(found)


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """Identifiers and strings of a file, docstrings apart."""
    tree = ast.parse(path.read_text())
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
