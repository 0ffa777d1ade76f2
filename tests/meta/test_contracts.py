"""A contract's version is raised when what plugins see of it changes.

tests/meta/contracts.json holds, for each contract module, its API version and a hash of its
public signatures. When this test fails: decide whether drivers written for the old contract still
work. If they do (something was added with a default), record the new hash; if they do not, raise
API in the module first. `python tests/meta/test_contracts.py` records.
"""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = ROOT / "core/modulm/contracts"
RECORD = Path(__file__).with_name("contracts.json")
PATHS = {
    ".".join(path.relative_to(CONTRACTS).with_suffix("").parts): path
    for path in CONTRACTS.rglob("*.py")
    if path.stem != "__init__"
}
PATHS["engine"] = ROOT / "core/serving/server/modulm_server/engine/client.py"
PATHS["route"] = ROOT / "core/serving/server/modulm_server/route.py"
MODULES = sorted(PATHS)


def signatures(tree: ast.Module) -> list[str]:
    """Fields, and methods without their bodies, of the public classes and functions."""
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            found.append(f"class {node.name}({bases})")
            found += [f"{node.name}: {line}" for line in members(node)]
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found.append(signature(node))
    return sorted(found)


def members(node: ast.ClassDef) -> list[str]:
    lines = []
    for member in node.body:
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            if not member.name.startswith("_") or member.name == "__init__":
                lines.append(signature(member))
        elif isinstance(member, ast.AnnAssign):
            lines.append(ast.unparse(member))
    return lines


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = "".join(f"@{ast.unparse(decorator)} " for decorator in node.decorator_list)
    returns = ast.unparse(node.returns) if node.returns else ""
    return f"{decorators}{node.name}({ast.unparse(node.args)}) -> {returns}"


def api(tree: ast.Module) -> int | None:
    """The version that a module states; one of a folder of modules stands in its `__init__`."""
    return next(
        (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "API"
        ),
        None,
    )


def state(module: str) -> dict[str, str | int]:
    path = PATHS[module]
    tree = ast.parse(path.read_text())
    version = api(tree) or api(ast.parse(path.with_name("__init__.py").read_text()))
    assert version, f"{path.name} states no API"
    text = "\n".join(signatures(tree))
    return {"api": version, "hash": hashlib.sha256(text.encode()).hexdigest()[:16]}


@pytest.mark.parametrize("module", MODULES)
def test_version_goes_with_the_signatures(module: str) -> None:
    recorded = json.loads(RECORD.read_text()).get(module)
    assert state(module) == recorded, (
        f"{PATHS[module].relative_to(ROOT)} changed: raise its API if old drivers break, "
        "then run `python tests/meta/test_contracts.py`"
    )


def test_no_block_states_a_version_for_models() -> None:
    """Else a model that inherits from the class would always claim to fit."""
    found = []
    for path in sorted((ROOT / "core/libs/layers/modulm_layers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found += [
                    f"{path.name}: {node.name}"
                    for member in node.body
                    if isinstance(member, ast.Assign) and ast.unparse(member.targets[0]) == "api"
                ]
    assert not found


if __name__ == "__main__":
    record = {module: state(module) for module in MODULES}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
