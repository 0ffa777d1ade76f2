"""Write docs/contracts/*.md: one page per kind of driver, from the docstrings of its contract.

`python tools/contract_pages.py` writes them; nothing is imported but the list of kinds.
`tests/meta/test_contract_pages.py` checks that they are up to date.
"""

from __future__ import annotations

import ast
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from workspace import ALL_KINDS, LIBRARIES  # noqa: E402

PAGES = ROOT / "docs/contracts"
CHANGES = ROOT / "tools/contract_changes.toml"
#: Kind -> a further module whose public classes its drivers implement or return.
_FURTHER = {"tokenizers": "core/modulm/contracts/tokenizer.py"}
_FOOT = "*Generated from the docstrings by `tools/contract_pages.py`.*\n"


def contracts() -> dict[str, tuple[str, Path, str]]:
    """Kind -> (module, its file, the name of the contract), for the kinds that have one."""
    found = {}
    for kind in ALL_KINDS.values():
        if kind.contract is not None:
            module, _, name = kind.contract.partition(":")
            package, *rest = module.split(".")
            folder = ROOT / "core" if package == "modulm" else LIBRARIES[package]
            found[kind.name] = module, folder.joinpath(package, *rest).with_suffix(".py"), name
    return found


def version_of(file: Path) -> int:
    """The `API` of a contract's module."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "API":
            value: int = ast.literal_eval(node.value)
            return value
    raise ValueError(f"{file} has no API")


def changes() -> dict[str, dict[int, str]]:
    """Kind -> version -> what changed for drivers."""
    table = tomllib.loads(CHANGES.read_text(encoding="utf-8"))
    return {kind: {int(v): text for v, text in texts.items()} for kind, texts in table.items()}


def pages() -> dict[Path, str]:
    """Return every page's path and text."""
    written = {PAGES / f"{kind}.md": page(kind) for kind in contracts()}
    written[PAGES / "index.md"] = overview()
    return written


def overview() -> str:
    """The page that lists all contracts."""
    lines = [
        "# Contracts",
        "",
        "A driver subclasses the contract of its kind and states which version it was written for",
        "(`api = 2`, or `api = (1, 2)` for several).",
        "[Versions and deprecation](../compatibility.md) says what may change and when.",
        "",
        "| kind | contract | version |",
        "|---|---|---|",
    ]
    for kind, (module, file, name) in sorted(contracts().items()):
        lines.append(f"| [`{kind}`]({kind}.md) | `{module}.{name}` | {version_of(file)} |")
    return "\n".join([*lines, "", _FOOT])


def page(kind: str) -> str:
    """The page of one kind."""
    module, file, name = contracts()[kind]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    classes = public_classes(tree)
    if kind in _FURTHER:
        classes |= public_classes(ast.parse((ROOT / _FURTHER[kind]).read_text(encoding="utf-8")))
    version = version_of(file)
    noun = ALL_KINDS[kind].noun
    lines = [
        f"# {noun[0].upper()}{noun[1:]}: contract",
        "",
        f"`{module}.{name}`, entry-point group `{ALL_KINDS[kind].group}`, version {version}.",
        "",
        prose(ast.get_docstring(tree)),
        "",
        *described(classes.pop(name)),
    ]
    if classes:
        lines += ["## Values and helpers", ""]
    for other in classes.values():
        lines += described(other)
    lines += ["## Changes", ""]
    for number, text in sorted(changes().get(kind, {}).items(), reverse=True):
        lines += textwrap.wrap(
            f"- **{number}**: {text}", 100, subsequent_indent="  ", break_long_words=False,
            break_on_hyphens=False,  # links
        )  # fmt: skip
    lines += ["- **1**: The first version.", "", _FOOT]
    return "\n".join(lines)


def public_classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """The public classes of a module by name."""
    return {n.name: n for n in tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_"}


def described(node: ast.ClassDef) -> Iterator[str]:
    """A class: docstring, attributes, methods."""
    bases = ", ".join(ast.unparse(base) for base in node.bases if ast.unparse(base) != "ABC")
    yield from (f"## {node.name}", "")
    if bases:
        yield from (f"Subclass of `{bases}`.", "")
    yield from (prose(ast.get_docstring(node)), "")
    fields = [member for member in node.body if isinstance(member, ast.AnnAssign)]
    if fields:
        yield from ("```text", *map(shown, fields), "```", "")
    for member in node.body:
        public = (
            getattr(member, "name", "_") == "__init__" or getattr(member, "name", "_")[0] != "_"
        )
        if public and isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from method(member)


def shown(member: ast.AnnAssign) -> str:
    """A field as in the source, on one line."""
    text = ast.unparse(member)
    return text if len(text) <= 100 else f"{ast.unparse(member.target)}: ..."


def method(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """A method: whether drivers must have it, its signature and docstring."""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    traits = [("required", "abstractmethod"), ("property", "property"),
              ("class method", "classmethod"), ("static method", "staticmethod")]  # fmt: skip
    notes = [note for note, decorator in traits if decorator in decorators]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    yield from (f"### {node.name}" + (f" ({', '.join(notes)})" if notes else ""), "")
    signature = f"{node.name}({ast.unparse(node.args)}){returns}"
    if len(signature) > 96:
        arguments = ast.unparse(node.args).split(", ")
        signature = "\n".join(
            textwrap.wrap(", ".join(arguments), 92, initial_indent="    ", subsequent_indent="    ")
        )
        signature = f"{node.name}(\n{signature}\n){returns}"
    yield from ("```text", signature, "```", "")
    if text := prose(ast.get_docstring(node)):
        yield from (text, "")


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: indented blocks become fenced ones."""
    lines: list[str] = []
    fenced = False
    for line in (docstring or "").splitlines():
        indented = line.startswith("    ") or (fenced and not line)
        if indented and not fenced:
            lines.append("```text")
        elif fenced and line and not indented:
            while lines[-1] == "":
                lines.pop()
            lines += ["```", ""]
        fenced = indented
        lines.append(line.removeprefix("    ") if fenced else line)
    if fenced:
        lines.append("```")
    return "\n".join(lines).strip()


def main() -> None:
    """Write the pages and remove those of kinds that are gone."""
    PAGES.mkdir(exist_ok=True)
    written = pages()
    for path in PAGES.glob("*.md"):
        if path not in written:
            path.unlink()
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    print(f"wrote {len(written)} pages to {PAGES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
