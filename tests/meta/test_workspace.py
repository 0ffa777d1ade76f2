"""The rules of tools/: every plugin folder is legal, and nothing is over its budget."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / f"tools/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_plugin_folder_is_legal() -> None:
    assert list(tool("workspace").check()) == []


def test_nothing_is_over_budget() -> None:
    assert list(tool("size").over_budget()) == []


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool, on a copy of the root's project table and one plugin of the template."""
    module = tool("workspace")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    module.new("tool_parsers", "foo")
    module.root.cache_clear()
    return module


def test_new_makes_a_legal_folder(workspace: ModuleType, tmp_path: Path) -> None:
    assert list(workspace.check()) == []
    assert (tmp_path / "plugins/parsers/foo/modulm_parser_foo/__init__.py").is_file()
    assert (tmp_path / "tests/plugins/parsers/test_modulm_parser_foo.py").is_file()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("modulm-parser-foo", "modulm-foo-parser"), "name is 'modulm-foo-parser'"),
        (('version = "0.1.0"', 'version = "9.0"'), "version is '9.0'"),
        (("modulm>=0.1,<0.2", "modulm"), "does not depend on"),
        (("modulm.tool_parsers", "modulm.parsers"), "unknown entry-point group"),
        (("FooToolParser", "Elsewhere"), "is not in the package"),
        (("[tool.uv", "[tool.ruff]\nx = 1\n\n[tool.uv"), "the only tool table"),
        (("description", "urls = {}\ndescription"), "unknown key project.urls"),
    ],
)
def test_what_is_wrong_is_said(
    workspace: ModuleType, tmp_path: Path, change: tuple[str, str], complaint: str
) -> None:
    path = tmp_path / "plugins/parsers/foo/pyproject.toml"
    path.write_text(path.read_text().replace(*change))
    assert complaint in "\n".join(workspace.check())


def test_stray_files_and_imports_are_found(workspace: ModuleType, tmp_path: Path) -> None:
    workspace.new("platforms", "chip")
    folder = tmp_path / "plugins/parsers/foo"
    (folder / "notes.md").touch()
    (folder / "modulm_parser_foo/more.py").write_text("from modulm_platform_chip import X\n")
    found = "\n".join(workspace.check())
    assert "notes.md: a plugin folder holds" in found
    assert "more.py:1: imports another plugin, modulm_platform_chip" in found


def test_sync_puts_shared_keys_right(workspace: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "plugins/parsers/foo/pyproject.toml"
    right = path.read_text()
    wrong = right.replace('"0.1.0"', '"0.0.1"').replace("modulm>=0.1,<0.2", "modulm>=0.0,<0.1")
    path.write_text(wrong.replace("license", "# license"))
    workspace.sync()
    assert list(workspace.check()) == []


def test_lines_that_count() -> None:
    size = tool("size")
    source = '"""Docstring\nof two lines."""\n\n# comment\nx = 1  # trailing\n\ny = (\n    2,\n)\n'
    assert size.code_lines(source) == {5, 7, 8, 9}
