"""Line budgets: how long a file, a function, a model and the whole core may be.

A line counts if it holds code: blank lines, comments and docstrings do not. When an honest
thought is longer, raise its number in ALLOWED, with the reason; that line gets reviewed.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = 10_000
FILE = 500
FUNCTION = 80
MODEL = 300

#: "path" or "path:function" -> lines, each with the reason beside it.
ALLOWED: dict[str, int] = {
    # contracts and workers for drafts, media, adapters, transfers and stages; 190 flags;
    # encoder-decoder caches, ranks that share experts and sequences
    # every call into a plugin is watched and its answer checked (ADR 0048)
    "core": 14_400,
}

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Name, first and last line of each function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, node.end_lineno or node.lineno


def sources() -> Iterator[Path]:
    """Every Python file that ships."""
    for folder in ("core", "plugins", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not {"build", "__pycache__"} & set(path.relative_to(ROOT).parts):
                yield path


def is_model(path: Path) -> bool:
    """Whether the file holds a model: plugins/models/<family>/<package>/<file>.py."""
    parts = path.relative_to(ROOT).parts
    return parts[:2] == ("plugins", "models") and len(parts) == 5


def over_budget() -> Iterator[str]:
    """A sentence for every budget that is overdrawn."""
    core = 0
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text()
        lines = code_lines(source)
        if name.startswith("core/modulm/") and not name.startswith("core/modulm/testing/"):
            core += len(lines)
        allowed = ALLOWED.get(name, MODEL if is_model(path) else FILE)
        if len(lines) > allowed:
            yield f"{name}: {len(lines)} lines, {allowed} allowed"
        for function, first, last in functions(source):
            size = len(lines & set(range(first, last + 1)))
            allowed = ALLOWED.get(f"{name}:{function}", FUNCTION)
            if size > allowed:
                yield f"{name}:{first}: {function} has {size} lines, {allowed} allowed"
    allowed = ALLOWED.get("core", CORE)
    print(f"core: {core} lines, {allowed} allowed, {CORE} meant")
    if core > allowed:
        yield f"core: {core} lines, {allowed} allowed"


def main() -> int:
    """Print what is over budget; 1 if anything is."""
    found = list(over_budget())
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
