"""Each message that docs/troubleshooting.md quotes is in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs/troubleshooting.md"
MESSAGES = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.M)


@cache
def sources() -> list[str]:
    """The text of every module that ships."""
    files = (path for folder in ("core", "plugins") for path in (ROOT / folder).rglob("*.py"))
    return [path.read_text(encoding="utf-8") for path in files if "build" not in path.parts]


def texts(node: ast.AST) -> Iterator[str]:
    """Strings of a module, `…` where something is put in; joined ones as one."""
    for each in ast.walk(node):
        if text := written(each):
            yield text


def written(node: ast.AST) -> str:
    """A string as the code writes it; "" for what is none."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(written(value) or "…" for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right) if written(left):
            return written(left) + (written(right) or "…")
    return ""


def matches(message: str, text: str) -> bool:
    """Whether a text of the code prints the message, or begins or ends so that it does."""
    pattern = ".*".join(re.escape(part.strip()) for part in message.split("…"))
    return re.search(pattern, " ".join(text.split()), re.S) is not None


def is_in_code(message: str) -> bool:
    """Whether a string of the code can print the message."""
    words = re.findall(r"[A-Za-z]+", message)  # Few modules have all of them and are parsed.
    modules = (ast.parse(each) for each in sources() if all(word in each for word in words))
    return any(matches(message, text) for module in modules for text in texts(module))


@pytest.mark.parametrize("message", MESSAGES)
def test_it_is_in_the_code(message: str) -> None:
    assert is_in_code(message)


def test_what_nobody_says_is_found_out() -> None:
    assert len(MESSAGES) > 15
    assert not is_in_code("there is a dragon … in the cache")
    assert not is_in_code("the weights take … GiB and … has … dragons")
