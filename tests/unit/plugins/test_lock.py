"""A lock lists the plugins of an environment; a start that requires it refuses any other."""

from __future__ import annotations

import base64
import hashlib
from importlib.metadata import distributions
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

import modulm_cli.flags
import modulm_plugin_lock.lock
from modulm.config import EngineConfig
from modulm.errors import ConfigError
from modulm.plugins import PluginManager
from modulm.plugins.manager import using
from modulm.plugins.selection import Selection
from modulm_cli.plugin_lock import check_lock
from modulm_command_plugins.command import command
from modulm_plugin_lock import check_config, check_packages, lock_digest, read_lock, take_lock
from modulm_plugin_lock.files import is_editable
from modulm_plugin_lock.hooks import modulm_config_final
from modulm_server.command import command as serve

POINTS = {"modulm.schedulers": {"one": "mod_a:Shortest"}}
OPTIONS = {"attention": {"cpu_paged": {"threads": 2}}}


@pytest.fixture
def environment(install, driver, tmp_path, monkeypatch) -> Path:
    """Site-packages with one plugin, and no other distributions."""
    install("modulm-a", POINTS, {"mod_a": driver})
    only = lambda: distributions(path=[str(tmp_path)])  # noqa: E731
    monkeypatch.setattr(modulm_plugin_lock.lock, "distributions", only)
    return tmp_path


@pytest.fixture
def lock(environment) -> str:
    path = environment / "plugins.lock"
    path.write_text(take_lock("", {}, ()).text())
    return str(path)


def test_the_lock_says_what_is_installed_and_is_readable(environment, lock):
    text = Path(lock).read_text()
    assert text.startswith("# Plugins of one environment")
    table = yaml.safe_load(text)
    entry = table["packages"]["modulm-a"]
    assert entry["version"] == "1.0"
    assert entry["provides"] == {"schedulers/one": "mod_a:Shortest"}
    assert len(entry["sha256"]) == 64
    check_packages(lock)
    assert read_lock(lock)[1] == hashlib.sha256(Path(lock).read_bytes()).hexdigest()


def _new_package(folder, install):
    install("modulm-b", {"modulm.schedulers": {"two": "mod_a:Shortest"}}, {})


def _no_package(folder, install):
    (folder / "modulm_a-1.0.dist-info").rename(folder / "elsewhere")


def _new_version(folder, install):
    metadata = folder / "modulm_a-1.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("1.0", "1.1"))


def _new_content(folder, install):
    (folder / "mod_a.py").write_text((folder / "mod_a.py").read_text() + "\n# changed\n")


def _new_entry_point(folder, install):
    points = folder / "modulm_a-1.0.dist-info/entry_points.txt"
    points.write_text(points.read_text() + "three = mod_a:Shortest\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_new_package, "modulm-b 1.0 is installed and not in the lock"),
        (_no_package, "modulm-a 1.0 is in the lock and not installed"),
        (_new_version, "modulm-a is 1.1, the lock has 1.0"),
        (_new_content, "modulm-a 1.0 has other files than the lock says"),
        (_new_entry_point, "modulm-a 1.0 has other entry points: schedulers/three"),
    ],
)
def test_any_difference_is_refused_and_named(environment, lock, install, change, message):
    change(environment, install)
    with pytest.raises(ConfigError, match=message) as error:
        check_packages(lock)
    assert error.value.field == "plugins_lock"
    assert "`modulm plugins lock`" in str(error.value)


def test_the_digest_does_not_depend_on_the_installer_and_sees_added_modules(environment, lock):
    package = environment / "mod_b"
    package.mkdir()
    (package / "__init__.py").write_text("A = 1\n")
    (package / "data.txt").write_text("data\n")
    info = environment / "modulm_b-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: modulm-b\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[modulm.schedulers]\ntwo = mod_b:A\n")
    found = take_lock("", {}, ()).packages["modulm-b"]
    rows = ["modulm_b-1.0.dist-info/RECORD,,", "../bin/tool,sha256=abc,3"]
    for file in ("mod_b/__init__.py", "mod_b/data.txt"):
        digest = hashlib.sha256((environment / file).read_bytes()).digest()
        rows.append(f"{file},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},1")
    (info / "RECORD").write_text("\n".join(rows) + "\n")
    assert take_lock("", {}, ()).packages["modulm-b"] == found
    (package / "__pycache__").mkdir()
    (package / "__pycache__/x.pyc").write_bytes(b"compiled")
    assert take_lock("", {}, ()).packages["modulm-b"] == found
    (package / "added.py").write_text("")
    assert take_lock("", {}, ()).packages["modulm-b"] != found


def test_the_modules_of_an_editable_installation_count(environment, lock):
    info = environment / "modulm_a-1.0.dist-info"
    (info / "direct_url.json").write_text('{"url":"file:///x","dir_info":{"editable":true}}')
    (info / "RECORD").write_text("modulm_a.pth,,\n")
    check_packages(lock)
    assert is_editable(next(iter(distributions(name="modulm-a", path=[str(environment)]))))
    (environment / "mod_a.py").write_text("changed = True\n")
    with pytest.raises(ConfigError, match=r"modulm-a 1\.0 has other files"):
        check_packages(lock)


def test_selection_options_and_plugin_files_belong_to_the_lock(environment):
    parser = environment / "parser.py"
    parser.write_text("pass\n")
    path = environment / "plugins.lock"
    path.write_text(take_lock("-one", OPTIONS, [str(parser)]).text())
    same = {"plugin_config": OPTIONS, "tool_parser_plugin": str(parser)}
    with using(PluginManager(Selection.parse("-one"))):
        check_config(str(path), EngineConfig.from_keywords(**same))
        with pytest.raises(ConfigError, match=r"--plugin-config is \{\}, the lock has \{'atten"):
            check_config(str(path), EngineConfig.from_keywords(tool_parser_plugin=str(parser)))
        other = environment / "other.py"
        other.write_text("pass\n")
        config = EngineConfig.from_keywords(**same | {"tool_parser_plugin": str(other)})
        with pytest.raises(ConfigError, match=r"other.py is not in the lock"):
            check_config(str(path), config)
        parser.write_text("1 / 0\n")
        with pytest.raises(ConfigError, match=r"parser.py has changed"):
            check_config(str(path), EngineConfig.from_keywords(**same))
    parser.write_text("pass\n")
    with using(PluginManager()), pytest.raises(ConfigError, match="--plugins is '', the lock has"):
        check_config(str(path), EngineConfig.from_keywords(**same))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list", "is no lock of plugins: version: is required"),
        ("version: 1\npackages: {modulm-a: {version: 1}}", "is no lock of plugins: packages"),
        ("version: 2\npackages: {}", "has format 2, this modulm reads 1"),
        ("{", "is no lock of plugins"),
    ],
)
def test_a_file_that_is_no_lock(tmp_path, text, message):
    path = tmp_path / "x.lock"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        check_packages(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        check_packages(str(tmp_path / "missing.lock"))


def test_every_engine_checks_and_the_digest_is_known(environment, lock, install):
    config = EngineConfig.from_keywords(plugins_lock=lock)
    with using(PluginManager()):
        modulm_config_final(config)
        assert lock_digest(config) == read_lock(lock)[1]
        assert lock_digest(EngineConfig()) is None
        _new_package(environment, install)
        with pytest.raises(ConfigError, match="modulm-b"):
            modulm_config_final(config)


@pytest.mark.parametrize("how", ["option", "equals", "underscores", "file", "variable"])
def test_the_command_line_is_checked_wherever_the_flag_is(
    environment, lock, install, monkeypatch, how
):
    yaml_file = environment / "flags.yaml"
    yaml_file.write_text(f"plugins-lock: {lock}\n")
    arguments = {
        "option": ["--plugins-lock", lock],
        "equals": [f"--plugins-lock={lock}"],
        "underscores": ["--plugins_lock", lock],
        "file": ["--config", str(yaml_file)],
        "variable": [],
    }[how]
    if how == "variable":
        monkeypatch.setenv("MODULM_PLUGINS_LOCK", lock)
    check_lock(arguments)
    _new_package(environment, install)
    with pytest.raises(ConfigError, match="modulm-b"):
        check_lock(arguments)
    if how != "variable":
        check_lock(["--", *arguments])


def test_serve_refuses_before_it_imports_groups_of_flags(environment, lock, install, monkeypatch):
    def imported(command: click.Command) -> None:
        raise AssertionError("groups of flags were imported")

    _new_package(environment, install)
    monkeypatch.setattr(modulm_cli.flags, "groups_of", imported)
    result = CliRunner().invoke(serve, ["--plugins-lock", lock])
    assert result.exit_code == 2
    assert "--plugins-lock: the plugins differ from" in result.output
    assert "modulm-b 1.0 is installed and not in the lock" in result.output


def test_the_command_writes_what_serve_accepts(environment, tmp_path):
    path = tmp_path / "written.lock"
    arguments = ["lock", str(path), "--plugin-config", '{"attention": {"cpu_paged": {}}}']
    with using(PluginManager()):
        result = CliRunner().invoke(command, arguments)
        assert result.exit_code == 0, result.output
        assert f"wrote {path}: 1 packages" in result.stderr
        check_config(
            str(path), EngineConfig.from_keywords(plugin_config={"attention": {"cpu_paged": {}}})
        )
        printed = CliRunner().invoke(command, ["lock", "-"]).stdout
    assert yaml.safe_load(printed)["packages"] == yaml.safe_load(path.read_text())["packages"]
