"""Hook plugins are registered whole or not at all, and cannot hurt what does not need them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from modulm.config import EngineConfig
from modulm.errors import PluginBroken, PluginConflict, PluginIncompatible
from modulm.plugins import Choice, Declaration, PluginManager, hookimpl
from modulm.plugins.selection import Selection

HOOK = {"modulm": {"extra": "mod_hook"}}
DECLARES = """
    from modulm.plugins import Declaration, hookimpl

    @hookimpl
    def modulm_models():
        return [Declaration(f"Extra{i}", "mod_models:Extra", api=1) for i in range(3)]
"""


def models(manager: PluginManager) -> set[str]:
    return {d.name for d in manager.names("models") if d.name.startswith("Extra")}


def test_declared_lazily_and_once(install):
    install("modulm-a", HOOK, {"mod_hook": DECLARES})
    manager = PluginManager()
    assert models(manager) == set()
    assert "mod_hook" not in sys.modules
    assert manager.find("models", "Extra1").origin == "modulm-a 1.0"
    manager.load_hooks()
    manager.add(sys.modules["mod_hook"])
    assert models(manager) == {"Extra0", "Extra1", "Extra2"}
    assert len(manager.hook.modulm_models()) == 1
    assert "mod_models" not in sys.modules


def test_declared_with_a_wrong_api_is_not_imported(install):
    install("modulm-a", HOOK, {"mod_hook": DECLARES.replace("api=1", "api=7")})
    manager = PluginManager()
    with pytest.raises(PluginIncompatible, match="written for version 7"):
        manager.load("models", "Extra1")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "@hookimpl\ndef modulm_modles(): return []",
            "no hook modulm_modles; did you mean",
        ),
        ("@hookimpl\ndef modulm_choose_attention(spek): ...", "spek"),
        ("def modulm_models(): return []", "modulm_models is not marked as a hook"),
        ("@hookimpl\ndef modulm_models(): return ['Extra']", "not a Declaration"),
        ("@hookimpl\ndef modulm_models(): raise OSError('no list')", "no list"),
        (
            "@hookimpl\ndef modulm_models(): return [Declaration('ExtraBad', 'nonsense')]",
            "package.module:attribute",
        ),
        (
            "@hookimpl\ndef modulm_parsers(): return [Declaration('p', 'a:B')]",
            "tool_parsers or reasoning_parsers",
        ),
        ("import no_such_module", "no_such_module"),
    ],
)
def test_bad_plugin_leaves_nothing(install, driver, source, message):
    header = "from modulm.plugins import Declaration, hookimpl\n"
    good = "@hookimpl\ndef modulm_platforms(): return [Declaration('extra_chip', 'a:B', api=1)]\n"
    install("modulm-a", HOOK, {"mod_hook": header + good + source})
    install("modulm-b", {"modulm.schedulers": {"fine": "mod_b:Shortest"}}, {"mod_b": driver})
    manager = PluginManager()
    manager.load_hooks()
    assert "extra_chip" not in {d.name for d in manager.names("platforms")}
    assert models(manager) == set()
    assert manager.hook.modulm_platforms() == []
    assert manager.load("schedulers", "fine").name == "shortest"
    problem = manager.problems["extra"]
    assert isinstance(problem, PluginBroken)
    assert message in str(problem)
    assert "modulm-a 1.0" in str(problem)


def test_bad_plugin_that_was_asked_for_is_an_error(install):
    install("modulm-a", HOOK, {"mod_hook": "1 / 0"})
    manager = PluginManager(Selection.parse("modulm-a"))
    for _ in range(2):
        with pytest.raises(PluginBroken, match="division by zero"):
            manager.load_hooks()


def test_name_that_may_come_from_a_broken_plugin_says_so(install):
    install("modulm-a", HOOK, {"mod_hook": "1 / 0"})
    with pytest.raises(Exception, match="division by zero"):
        PluginManager().load("models", "Extra1")


def test_entry_point_and_hook_with_one_name(install):
    install("modulm-a", HOOK, {"mod_hook": DECLARES})
    install("modulm-b", {"modulm.models": {"Extra1": "mod_b:Extra"}}, {})
    manager = PluginManager()
    with pytest.raises(PluginConflict, match="modulm-a 1.0 and by modulm-b 1.0|modulm-b.*modulm-a"):
        manager.find("models", "Extra1")
    assert manager.find("models", "Extra2").distribution == "modulm-a"


def test_higher_priority_stands_in(install):
    install("modulm-a", HOOK, {"mod_hook": DECLARES.replace("api=1", "priority=5")})
    install("modulm-b", {"modulm.models": {"Extra1": "mod_b:Extra"}}, {})
    assert PluginManager().find("models", "Extra1").distribution == "modulm-a"


def test_notice_that_raises_switches_its_plugin_off(caplog):
    calls = []

    class Bad:
        @hookimpl
        def modulm_step_finished(self, stats):
            raise RuntimeError("no thanks")

    class Good:
        @hookimpl
        def modulm_step_finished(self, stats):
            calls.append(stats)

    manager = PluginManager()
    manager.add(Good(), "good")
    manager.add(Bad(), "bad")
    manager.notify("modulm_step_finished", stats=1)
    manager.notify("modulm_step_finished", stats=2)
    assert calls == [1, 2]
    assert caplog.text.count("plugin bad raised an error in modulm_step_finished") == 1


def test_historic_notice_reaches_later_plugins():
    calls = []

    class Late:
        @hookimpl
        def modulm_config_final(self, config):
            calls.append(config)

    manager = PluginManager()
    manager.config_final(config := EngineConfig())
    manager.add(Late())
    assert calls == [config]


def test_misspelt_hook_is_not_told_history():
    calls = []

    class Late:
        @hookimpl
        def modulm_config_final(self, config):
            calls.append(config)

        @hookimpl
        def modulm_confg(self): ...

    manager = PluginManager()
    manager.config_final(EngineConfig())
    with pytest.raises(PluginBroken, match="modulm_confg"):
        manager.add(Late())
    assert calls == []


def test_object_plugins_cannot_go_to_workers():
    manager = PluginManager()
    manager.add(SimpleNamespace(), "loose")
    with pytest.raises(Exception, match="workers need a module"):
        manager.snapshot()


def test_declaration_is_plain_data():
    declaration = Declaration("Extra", "a.b:C", kind="models", distribution="modulm-a", version="1")
    assert str(declaration) == "models/Extra (modulm-a 1)"


class Recorder(list[str]):
    """Plugins made of functions; each notes its name when it is called."""

    def plugin(self, name: str, answer: Any = None, **options: Any) -> object:
        class Plugin:
            @hookimpl(**options)
            def modulm_choose_platform(plugin, probes: Any) -> Any:
                self.append(name)
                return answer

            @hookimpl(**options)
            def modulm_report_header(plugin, config: Any) -> Any:
                self.append(name)
                return answer

        return Plugin()


def make(*plugins: object) -> PluginManager:
    """A manager that has these hook plugins and no installed ones."""
    manager = PluginManager(Selection(allow=("commands/plugins",)))
    for number, plugin in enumerate(plugins):
        manager.add(plugin, f"plugin{number} (modulm-p{number} 1.0)")
    return manager


def test_last_registered_first_but_for_tryfirst_and_trylast():
    calls = Recorder()
    manager = make(
        calls.plugin("first", ["a"], tryfirst=True),
        calls.plugin("one", ["b"]),
        calls.plugin("last", ["c"], trylast=True),
        calls.plugin("two", ["d"]),
        calls.plugin("silent"),
    )
    assert manager.gather("modulm_report_header", config=None) == ["a", "d", "b", "c"]
    assert calls == ["first", "silent", "two", "one", "last"]


def test_firstresult_stops_at_the_first_answer():
    calls = Recorder()
    choice = Choice("chip", "mine")
    manager = make(calls.plugin("never"), calls.plugin("answers", choice), calls.plugin("silent"))
    chosen = manager.hook.modulm_choose_platform(probes={})
    assert chosen == choice
    assert chosen.by == "plugin1 (modulm-p1 1.0)"
    assert calls == ["silent", "answers"]


class Upper:
    """Both styles of wrapper around the lines of the banner."""

    @hookimpl(wrapper=True)
    def modulm_report_header(self, config):
        answers = yield
        return [[line.upper() for line in lines] for lines in answers]


class OldUpper:
    @hookimpl(hookwrapper=True)
    def modulm_report_header(self, config):
        outcome = yield
        outcome.force_result([[f"{line}!" for line in lines] for lines in outcome.get_result()])


def test_wrappers_run_around_the_result():
    calls = Recorder()
    manager = make(Upper(), calls.plugin("a", ["hello"]), OldUpper(), calls.plugin("b", ["you"]))
    assert manager.gather("modulm_report_header", config=None) == ["YOU!", "HELLO!"]


def test_a_wrapper_sees_an_error_where_raising_stops():
    seen = []

    class Around:
        @hookimpl(wrapper=True)
        def modulm_model_built(self, model, config):
            try:
                return (yield)
            except PluginBroken as error:
                seen.append(str(error))
                raise RuntimeError("explained") from error

    class Raises:
        @hookimpl
        def modulm_model_built(self, model, config):
            raise ValueError("no such layer")

    manager = make(Raises(), Around())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="explained"):
            manager.hook.modulm_model_built(model=None, config=None)
    message = "hooks/plugin0 (modulm-p0 1.0): modulm_model_built raised an error "
    reason = "(--plugins=-hooks/plugin0 leaves it out): ValueError: no such layer"
    assert seen == [message + reason] * 2


def failing_before() -> object:
    class Fails:
        @hookimpl(wrapper=True)
        def modulm_report_header(self, config):
            raise ValueError("before")
            yield

    return Fails()


def failing_after() -> object:
    class Fails:
        @hookimpl(wrapper=True)
        def modulm_report_header(self, config):
            yield
            raise ValueError("after")

    return Fails()


def failing_old() -> object:
    class Fails:
        @hookimpl(hookwrapper=True)
        def modulm_report_header(self, config):
            yield
            raise ValueError("old")

    return Fails()


def yielding_twice() -> object:
    class Fails:
        @hookimpl(wrapper=True)
        def modulm_report_header(self, config):
            yield
            yield

    return Fails()


def never_yielding() -> object:
    class Fails:
        @hookimpl(wrapper=True)
        def modulm_report_header(self, config):
            return []
            yield

    return Fails()


@pytest.mark.parametrize(
    "fails", [failing_before, failing_after, failing_old, yielding_twice, never_yielding]
)
def test_a_wrapper_that_fails_is_switched_off_and_the_result_survives(fails, caplog):
    calls = Recorder()
    manager = make(calls.plugin("a", ["hello"]), fails(), Upper())
    for _ in range(2):
        assert manager.gather("modulm_report_header", config=None) == ["HELLO"]
    message = (
        "plugin plugin1 (modulm-p1 1.0) raised an error in modulm_report_header and is disabled"
    )
    assert caplog.text.count(message) == 1


def test_one_that_raises_is_switched_off_alone_and_altogether(caplog):
    class Raises:
        @hookimpl
        def modulm_choose_platform(self, probes):
            raise ValueError("no")

        @hookimpl
        def modulm_report_header(self, config):
            return ["never"]

    calls = Recorder()
    choice = Choice("chip", "mine")
    manager = make(calls.plugin("answers", choice), Raises())
    assert manager.hook.modulm_choose_platform(probes={}) == choice
    assert "plugin plugin1 (modulm-p1 1.0) raised an error in modulm_choose_platform" in caplog.text
    assert "ValueError: no" in caplog.text
    assert ["never"] not in manager.hook.modulm_report_header(config=None)


def test_only_generators_wrap():
    class NotOne:
        @hookimpl(wrapper=True)
        def modulm_report_header(self, config):
            return []

    class Notes:
        @hookimpl(wrapper=True)
        def modulm_config_final(self, config):
            return (yield)

    with pytest.raises(PluginBroken, match="not a generator"):
        make(NotOne())
    with pytest.raises(PluginBroken, match="historic incompatible"):
        make(Notes())


def test_arguments_are_given_by_name_and_may_be_left_out():
    class Static:
        @staticmethod
        @hookimpl
        def modulm_choose_parser(checkpoint):
            return Choice(checkpoint, "s")

    class NamedPlugin:
        @classmethod
        @hookimpl(specname="modulm_choose_model")
        def pick(cls, config):
            return Choice(config["name"], "n")

    manager = make(Static(), NamedPlugin())
    assert manager.hook.modulm_choose_parser(kind="x", checkpoint="c").name == "c"
    assert manager.hook.modulm_choose_model(architectures=[], config={"name": "m"}).name == "m"


def test_two_distributions_with_one_hook_name_are_refused_and_named(install, caplog) -> None:
    source = "from modulm.plugins import hookimpl\n@hookimpl\ndef modulm_report_header(config):\n"
    for package in "ab":
        module = {f"mod_{package}": f"{source}    return ['{package}']\n"}
        install(f"modulm-{package}", {"modulm": {"same": f"mod_{package}"}}, module)
    install("modulm-c", {"modulm": {"kv_transfer": "mod_a"}}, {})
    manager = PluginManager()
    lines = manager.gather("modulm_report_header", config=None)
    assert not {"a", "b"} & set(lines)
    both = "hook plugin 'same' is provided by modulm-a 1.0 and by modulm-b 1.0"
    assert both in str(manager.problems["same"])
    assert "--plugins=-modulm-a" in caplog.text
    assert "--plugins=-modulm-b" in caplog.text
    assert "that of modulm-c is not used" in caplog.text
    implementations = manager.hook.modulm_config_final.get_hookimpls()
    assert any("kv_transfer (modulm-kv-transfer" in i.plugin_name for i in implementations)
    alone = PluginManager(Selection.parse("-modulm-b,-modulm-c"))
    assert "a" in alone.gather("modulm_report_header", config=None)
