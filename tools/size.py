"""Line budgets: maximum length of a file, a function, a model and the core.

Lines with code count; blank lines, comments and docstrings do not. To exceed a budget, raise the
number in ALLOWED and give the reason; that line gets reviewed.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Lines of `core/modulm`, without `testing/`; 10,000 is the aim.
CORE = 12_500
FILE = 500
FUNCTION = 80
MODEL = 300

#: "path" or "path:function" -> lines, each with a reason.
ALLOWED: dict[str, int] = {}

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
    """Return the numbers of lines with code."""
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
    """Yield name, first and last line of each function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, node.end_lineno or node.lineno


def sources() -> Iterator[Path]:
    """Yield every shipped Python file."""
    for folder in ("core", "plugins", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not {"build", "__pycache__"} & set(path.relative_to(ROOT).parts):
                yield path


def is_model(path: Path) -> bool:
    """Whether the file is a model: plugins/models/<family>/<package>/<file>.py."""
    parts = path.relative_to(ROOT).parts
    return parts[:2] == ("plugins", "models") and len(parts) == 5


def over_budget() -> Iterator[str]:
    """Yield a message for every exceeded budget."""
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
    print(f"core: {core} lines, {allowed} allowed")
    if core > allowed:
        yield f"core: {core} lines, {allowed} allowed"


def main() -> int:
    """Print what exceeds its budget; return 1 if anything does."""
    problems = list(over_budget())
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
