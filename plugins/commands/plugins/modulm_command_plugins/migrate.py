"""Rewrites imports of names that have moved, by modulm's `moved.txt`.

`from modulm.nn.moe import X` becomes `from modulm_layers.moe import X`; a name that was changed too
is imported under its old one, so that the code below still runs. Dotted uses after `import a.b`
are changed with it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from attrs import field, frozen

__all__ = ["Migration", "migrated", "new_name", "sources"]

_WIDTH = 100
_LEFT_OUT = frozenset({".git", ".venv", "__pycache__", "build", "dist", "node_modules", "venv"})


@frozen
class Migration:
    """A module's new text. remarks: what must be changed by hand, as "line N: ..."."""

    text: str
    remarks: tuple[str, ...] = field(default=())


def sources(path: Path) -> Iterator[Path]:
    """Yield a Python file, or those in a folder, without environments and build output."""
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*.py")):
        if not _LEFT_OUT & set(file.relative_to(path).parts):
            yield file


def new_name(name: str, moved: Mapping[str, str]) -> str | None:
    """Return the new name of a dotted name, "gone ..." if it has none, or None if it has not moved.

    What is inside a module that has moved is found there.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in moved:
            target, rest = moved[prefix], parts[length:]
            return target if target.startswith("gone") else ".".join([target, *rest])
    return None


def migrated(text: str, moved: Mapping[str, str]) -> Migration:
    """Rewrite a module. Raises SyntaxError if it is no Python."""
    tree = ast.parse(text)
    edits: list[tuple[ast.stmt | ast.expr, str]] = []
    remarks = []
    plain: dict[str, str] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        changed, gone = _statement(node, moved, plain)
        remarks += [f"line {node.lineno}: {name} is {why}" for name, why in gone]
        if changed is not None:
            if "#" in (ast.get_source_segment(text, node) or ""):
                remarks.append(
                    f"line {node.lineno}: has comments inside, change by hand: {changed}"
                )
            else:
                edits.append((node, changed))
    edits += [(node, plain[dotted]) for node, dotted in _uses(tree, plain)]
    lines = text.splitlines(keepends=True)
    for node, replacement in sorted(edits, key=lambda edit: _start(edit[0]), reverse=True):
        _replace(lines, node, replacement)
    return Migration("".join(lines), tuple(remarks))


def _statement(
    node: ast.Import | ast.ImportFrom, moved: Mapping[str, str], plain: dict[str, str]
) -> tuple[str | None, list[tuple[str, str]]]:
    """Return the new statement, None if it stays, and the names that are gone with the reason."""
    gone: list[tuple[str, str]] = []
    if isinstance(node, ast.Import):
        names = []
        for alias in node.names:
            target = new_name(alias.name, moved)
            if target is None or target.startswith("gone"):
                gone += [] if target is None else [(alias.name, target)]
                target = alias.name
            elif alias.asname is None:
                plain[alias.name] = target
            names.append(f"{target} as {alias.asname}" if alias.asname else target)
        before = ast.unparse(node).removeprefix("import ")
        return (None if before == ", ".join(names) else f"import {', '.join(names)}"), gone
    if node.level or node.module is None:
        return None, gone
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for alias in node.names:
        full = f"{node.module}.{alias.name}"
        target = new_name(node.module if alias.name == "*" else full, moved)
        if target is None or target.startswith("gone"):
            gone += [] if target is None else [(full, target)]
            target = full
        elif alias.name == "*":
            target = f"{target}.*"
        module, _, name = target.rpartition(".")
        bound = alias.asname or alias.name
        groups[module].append(name if name == bound else f"{name} as {bound}")
    if list(groups) == [node.module]:
        return None, gone
    indent = " " * node.col_offset
    return f"\n{indent}".join(_from(m, n, indent) for m, n in groups.items()), gone


def _from(module: str, names: list[str], indent: str) -> str:
    if not module:  # a package of its own now
        return f"\n{indent}".join(f"import {name}" for name in names)
    line = f"from {module} import {', '.join(names)}"
    if len(indent + line) <= _WIDTH:
        return line
    inside = "".join(f"{indent}    {name},\n" for name in names)
    return f"from {module} import (\n{inside}{indent})"


def _uses(tree: ast.Module, plain: Mapping[str, str]) -> Iterator[tuple[ast.expr, str]]:
    """Yield the expressions that spell a module of `import a.b.c` out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (dotted := ast.unparse(node)) in plain:
            yield node, dotted


def _start(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _replace(lines: list[str], node: ast.stmt | ast.expr, replacement: str) -> None:
    """Replace a node's text; columns of syntax trees count bytes."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    lines[first : last + 1] = [before + replacement + after]
