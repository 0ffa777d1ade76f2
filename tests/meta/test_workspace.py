"""The rules of tools/workspace.py and tools/size.py; the repository obeys them in `make check`."""

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
        (("version = ", "# version = "), "version is None"),
        (('"modulm>=', '"modulm!='), "does not depend on"),
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


def test_manifests_are_checked_and_written(workspace: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "plugins/parsers/foo"
    module = folder / "modulm_parser_foo/__init__.py"
    module.write_text("import httpx\n" + module.read_text())
    (folder / "modulm_parser_foo/modulm.toml").write_text("")
    found = "\n".join(workspace.check())
    assert "[tool.modulm]: needs differ from the source; run sync" in found
    assert "modulm_parser_foo/modulm.toml is not as [tool.modulm] says; run sync" in found
    workspace.sync()
    assert list(workspace.check()) == []
    assert 'needs = {network = ["*"]}' in (folder / "pyproject.toml").read_text()


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
    wrong = right.replace('version = "', 'version = "9').replace("modulm>=", "modulm>=0.0,<0.1,>=")
    path.write_text(wrong.replace("license", "# license"))
    workspace.sync()
    assert list(workspace.check()) == []


@pytest.fixture
def released(workspace: ModuleType, tmp_path: Path) -> ModuleType:
    """The same with the code that has the version, a model, and what the extras bring."""
    (tmp_path / "core/modulm").mkdir(parents=True)
    (tmp_path / "core/modulm/__init__.py").write_text('__version__ = "0.0.1"\n')
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/extras.toml").write_text(
        '[models]\nbig = ["bar"]\n[devices]\nchip = []\n[apart]\n[libraries]\nall = []\n'
    )
    workspace.new("models", "bar")
    workspace.sync()
    return workspace


def test_one_version_for_all(released: ModuleType, tmp_path: Path) -> None:
    released.bump("7.3.1")
    assert list(released.check()) == []
    assert '__version__ = "7.3.1"' in (tmp_path / "core/modulm/__init__.py").read_text()
    plugin = (tmp_path / "plugins/models/bar/pyproject.toml").read_text()
    assert 'version = "7.3.1"' in plugin
    assert '"modulm>=7.3,<7.4"' in plugin
    assert released.extras()["big"] == ["modulm-bar>=7.3,<7.4"]
    assert '"modulm-bar>=7.3,<7.4"' in (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "core/modulm/__init__.py").write_text('__version__ = "7.3.0"\n')
    assert "core/modulm/__init__.py: not version 7.3.1" in "\n".join(released.check())


@pytest.mark.parametrize("version", ["7", "7.3", "v7.3.1", "7.3.1rc1"])
def test_what_is_no_version(released: ModuleType, version: str) -> None:
    with pytest.raises(SystemExit, match="is not a version"):
        released.bump(version)
    assert list(released.check()) == []


def test_no_package_without_an_extra(released: ModuleType, tmp_path: Path) -> None:
    released.new("models", "baz")
    released.new("platforms", "chip")
    (tmp_path / "core/libs/side").mkdir(parents=True)
    (tmp_path / "core/libs/side/pyproject.toml").write_text('[project]\nname = "modulm-side"\n')
    found = "\n".join(released.check())
    assert "plugins/models/baz: in no group of [models]" in found
    assert "plugins/platforms/chip: in no group of [devices]" in found
    assert "modulm-baz: no extra brings it" in found
    assert "modulm-side: no extra brings it" in found
    assert "modulm-parser-foo: no extra" not in found


def test_extras_bring_what_they_say() -> None:
    workspace = tool("workspace")
    cpu, cuda = workspace.brought("cpu"), workspace.brought("cuda")
    assert {"modulm-qwen", "modulm-bert", "modulm-server", "modulm-kernels-cpu"} <= cpu
    assert "modulm-platform-cuda" in cuda - cpu
    assert "modulm-kernels-cpu" not in cuda
    assert not workspace.brought("encoders") & {"modulm-qwen", "modulm-server"}


def test_lines_that_count() -> None:
    size = tool("size")
    source = '"""Docstring\nof two lines."""\n\n# comment\nx = 1  # trailing\n\ny = (\n    2,\n)\n'
    assert size.code_lines(source) == {5, 7, 8, 9}
