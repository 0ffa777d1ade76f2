"""Listing imports nothing; loading imports one; each way of failing has its own error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from modulm.errors import (
    ArchitectureNotFound,
    PluginBroken,
    PluginConflict,
    PluginIncompatible,
    PluginNotFound,
)
from modulm.plugins import PluginManager
from modulm.plugins.selection import Selection

SCHEDULER = "modulm.schedulers"


def names(manager: PluginManager, kind: str = "schedulers") -> list[str]:
    return [declaration.name for declaration in manager.names(kind)]


def test_listing_imports_nothing(install, driver):
    install("modulm-a", {SCHEDULER: {"shortest": "mod_a:Shortest"}}, {"mod_a": driver})
    manager = PluginManager()
    declaration = manager.find("schedulers", "shortest")
    assert (declaration.distribution, declaration.version) == ("modulm-a", "1.0")
    assert declaration.target == "mod_a:Shortest"
    assert "mod_a" not in sys.modules


def test_loading_imports_only_what_is_named(install, driver):
    points = {SCHEDULER: {"shortest": "mod_a:Shortest", "other": "mod_b:Shortest"}}
    install("modulm-a", points, {"mod_a": driver, "mod_b": driver})
    manager = PluginManager()
    loaded = manager.load("schedulers", "shortest")
    assert loaded.__module__ == "mod_a"
    assert "mod_b" not in sys.modules
    assert manager.load("schedulers", "shortest") is loaded


def test_broken_module_names_itself_and_hurts_nobody(install, driver):
    points = {SCHEDULER: {"bad": "mod_bad:Shortest", "good": "mod_good:Shortest"}}
    install("modulm-a", points, {"mod_bad": "1 / 0", "mod_good": driver}, version="2.5")
    manager = PluginManager()
    with pytest.raises(
        PluginBroken, match=r"schedulers/bad \(modulm-a 2.5\).*ZeroDivision"
    ) as error:
        manager.load("schedulers", "bad")
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert manager.load("schedulers", "good").name == "shortest"
    assert "bad" in names(manager)


def test_module_that_exits_at_import_is_broken(install):
    install("modulm-a", {SCHEDULER: {"bad": "mod_bad:X"}}, {"mod_bad": "raise SystemExit(3)"})
    with pytest.raises(PluginBroken, match="SystemExit"):
        PluginManager().load("schedulers", "bad")


def test_missing_attribute_is_broken(install, driver):
    install("modulm-a", {SCHEDULER: {"bad": "mod_a:Nowhere"}}, {"mod_a": driver})
    with pytest.raises(PluginBroken, match="mod_a:Nowhere"):
        PluginManager().load("schedulers", "bad")


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ("", "states no contract version; set `api = 1`"),
        ("api = 99", "written for version 99 .* has version 1"),
        ("api = (2, 4)", "written for version 2 to 4 "),
        ("api = '1'", "states api = '1'"),
        ("api = True", "states api = True"),
    ],
)
def test_wrong_or_missing_api(install, driver, stated, message):
    source = driver.replace("api = 1", stated)
    install("modulm-a", {SCHEDULER: {"old": "mod_a:Shortest"}}, {"mod_a": source})
    manager = PluginManager()
    assert "old" in names(manager)
    with pytest.raises(PluginIncompatible, match=message):
        manager.load("schedulers", "old")


def test_api_range_that_holds_the_version(install, driver):
    source = driver.replace("api = 1", "api = (1, 3)")
    install("modulm-a", {SCHEDULER: {"wide": "mod_a:Shortest"}}, {"mod_a": source})
    assert PluginManager().load("schedulers", "wide").api == (1, 3)


def test_driver_of_another_class_is_broken(install):
    install("modulm-a", {SCHEDULER: {"x": "mod_a:X"}}, {"mod_a": "class X: api = 1"})
    with pytest.raises(PluginBroken, match=r"not a subclass of modulm.contracts.policy.Policy"):
        PluginManager().load("schedulers", "x")


def test_two_distributions_with_one_name(install, driver):
    install("modulm-a", {SCHEDULER: {"same": "mod_a:Shortest"}}, {"mod_a": driver})
    install("modulm-b", {SCHEDULER: {"same": "mod_b:Shortest"}}, {"mod_b": driver})
    with pytest.raises(PluginConflict) as error:
        PluginManager().load("schedulers", "same")
    assert "modulm-a 1.0 and by modulm-b 1.0" in str(error.value)
    assert "--plugins=-modulm-" in str(error.value)
    assert {"mod_a", "mod_b"}.isdisjoint(sys.modules)
    chosen = PluginManager(Selection.parse("-modulm-b"))
    assert chosen.load("schedulers", "same").__module__ == "mod_a"


def test_conflict_hurts_no_other_name(install, driver):
    install("modulm-a", {SCHEDULER: {"same": "mod_a:Shortest"}}, {"mod_a": driver})
    points = {SCHEDULER: {"same": "mod_b:Shortest", "own": "mod_b:Shortest"}}
    install("modulm-b", points, {"mod_b": driver})
    assert PluginManager().load("schedulers", "own").__module__ == "mod_b"


def test_distribution_found_twice_counts_once(install, driver, tmp_path, monkeypatch):
    install("modulm-a", {SCHEDULER: {"shortest": "mod_a:Shortest"}}, {"mod_a": driver})
    monkeypatch.syspath_prepend(str(tmp_path / "."))
    assert names(PluginManager()).count("shortest") == 1


def test_entry_points_installed_again_are_seen_at_once(install, driver):
    folder = install("modulm-a", {SCHEDULER: {"old": "mod_a:Shortest"}}, {"mod_a": driver})
    assert "old" in names(PluginManager())
    points = folder / "modulm_a-1.0.dist-info/entry_points.txt"
    points.write_text(f"[{SCHEDULER}]\nnew = mod_a:Shortest\n")
    assert {"old", "new"} & set(names(PluginManager())) == {"new"}


@pytest.mark.parametrize("source", ["assert False, 'not here'", "from modulm.nn.latent import X"])
def test_what_stevedore_lets_pass_and_what_has_moved(install, source):
    install("modulm-a", {SCHEDULER: {"bad": "mod_bad:X"}}, {"mod_bad": source})
    with pytest.raises(PluginBroken, match=r"modulm-a 1.0.*(not here|is now modulm_layers.mla)"):
        PluginManager().load("schedulers", "bad")


def test_unknown_name_has_close_matches_and_no_package_that_nobody_made(install, driver):
    install("modulm-a", {SCHEDULER: {"shortest": "mod_a:Shortest"}}, {"mod_a": driver})
    with pytest.raises(PluginNotFound) as error:
        PluginManager().load("schedulers", "shortst")
    assert "'shortst'; did you mean shortest (modulm-a 1.0)?" in str(error.value)
    assert "pip install" not in str(error.value)


def test_a_name_of_this_projects_packages_says_which_one(monkeypatch):
    manager = PluginManager()
    monkeypatch.setattr(manager, "_installed", ())
    with pytest.raises(PluginNotFound, match="; pip install modulm-scheduler-priority$"):
        manager.load("schedulers", "priority")


def test_unknown_architecture(install):
    with pytest.raises(ArchitectureNotFound) as error:
        PluginManager().load("models", "Xyz3MoeForCausalLM")
    assert str(error.value).endswith("; or --model-impl transformers")
    assert "pip install" not in str(error.value)


def test_unknown_kind():
    with pytest.raises(PluginNotFound, match=r"no kind 'modls' \(did you mean models\?\); kinds"):
        PluginManager().names("modls")


def test_failed_import_takes_back_its_registrations(install):
    source = """
        from modulm.plugins import register

        register("schedulers", "stray", "mod_a:Stray")
        raise RuntimeError("half way")
    """
    install("modulm-a", {SCHEDULER: {"bad": "mod_a:X"}}, {"mod_a": source})
    from modulm.plugins.manager import using

    with using(PluginManager()) as manager:
        with pytest.raises(PluginBroken, match="half way"):
            manager.load("schedulers", "bad")
        assert "stray" not in names(manager)


def test_importing_the_framework_is_cheap():
    code = (
        "import sys; from modulm.plugins import current; current().everything();"
        "print(*{'torch', 'pluggy', 'stevedore', 'cattrs'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
