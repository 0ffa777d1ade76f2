"""Platforms and kernels know devices; nothing else asks which one it is on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What is about devices: platforms, and the library that those of GPUs share.
ABOUT = (ROOT / "plugins/platforms", ROOT / "core/libs/gpu")
FILES = [
    path
    for folder in ("core", "plugins")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.is_relative_to(ABOUT[0]) and not path.is_relative_to(ABOUT[1])
]
_KINDS = frozenset({"cuda", "xpu", "hip", "mps", "npu"})
_FLAGS = frozenset({"is_cuda", "is_cpu", "is_xpu", "is_mps"})
#: A file without any of these words does not ask and is not parsed.
WORDS = re.compile(rf"\.(type|{'|'.join([*_KINDS, *_FLAGS])})\b")


def asked(tree: ast.AST) -> Iterator[str]:
    """Where a program asks for its device: `x.is_cuda`, `torch.cuda`, `device.type == ...`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            home = ast.unparse(node.value)
            of_torch = node.attr in _KINDS and home in ("torch", "torch.backends", "torch.version")
            if node.attr in _FLAGS or of_torch:
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if any(side.endswith("device.type") for side in sides):
                yield ast.unparse(node)


def test_nobody_asks_which_device_it_is_on() -> None:
    assert len(FILES) > 300
    asks = {
        str(path.relative_to(ROOT)): list(asked(ast.parse(text)))
        for path in FILES
        if WORDS.search(text := path.read_text())
    }
    assert {path: found for path, found in asks.items() if found} == {}


def test_such_questions_are_found() -> None:
    program = """
if x.is_cuda and torch.cuda.is_available() and torch.version.hip: pass
if platform.device.type == "cpu" or "cuda" != x.device.type: pass
y = x.to(device)
"""
    assert sorted(asked(ast.parse(program))) == [
        "'cuda' != x.device.type", "platform.device.type == 'cpu'", "torch.cuda",
        "torch.version.hip", "x.is_cuda",
    ]  # fmt: skip
