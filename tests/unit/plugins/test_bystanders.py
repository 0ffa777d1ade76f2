"""Installed packages that nobody asked for, and that are broken: they stop nothing, and are named.

Every package here is real: a folder with metadata on the path, made by the fixture `install`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

import modulm
from modulm.config import EngineConfig
from modulm.contracts.attention import AttentionSpec
from modulm.contracts.quantization import CheckpointInfo
from modulm.errors import (
    CheckpointError,
    ConfigError,
    PluginBroken,
    PluginConflict,
    PluginNotFound,
    UnsupportedError,
)
from modulm.ops import bind
from modulm.plugins import PluginManager, calls, defaults
from modulm.plugins.kinds import find_kind
from modulm.plugins.manager import using
from modulm_isolation.process_state import watch_imports
from modulm_server.engine.heartbeat import plugin_at_work
from modulm_server.engine.process_client import ProcessCoreClient
from modulm_server.engine.spawn import EngineProcess
from modulm_server.loop_watch import LoopWatch

PLATFORM = """
    import torch
    from modulm.contracts.platform import Memory, Platform, Probe

    class Chip(Platform):
        name = "chip"
        api = 1
        attention = ("sdpa",)
        dtypes = ("float32",)
        device = torch.device("cpu")

        @classmethod
        def probe(cls):
            {probe}

        def memory(self):
            return Memory(total=2**30, free=2**30)
"""
METHOD = """
    from modulm.contracts.quantization import QuantizationMethod

    class Odd(QuantizationMethod):
        name = "odd"
        api = {api}

        @classmethod
        def claims(cls, checkpoint):
            {claims}

        @classmethod
        def rejects(cls, spec, platform):
            return None
"""
BACKEND = """
    from modulm.contracts.attention import AttentionBackend

    class First(AttentionBackend):
        name = "a_first"
        api = {api}

        @classmethod
        def rejects(cls, spec, platform, ops):
            {rejects}
"""
LOADER = """
    from modulm.contracts.loader import WeightLoader

    class Mine(WeightLoader):
        name = "a_mine"
        api = {api}

        @classmethod
        def opens(cls, path):
            {opens}
"""


class Cpu:
    """What choosing a backend reads of a platform."""

    name = "cpu"
    attention = ("sdpa",)


SPEC = AttentionSpec(4, 2, 16, 0.25, "float32", "float32")
RAISES = ("raise ValueError('boom')", "ValueError: boom")
EXITS = ("raise SystemExit(3)", "SystemExit: 3")
FAULTS = [RAISES, EXITS, ("return 7", "gave 7, not ")]


def install_driver(install, kind: str, name: str, source: str, **blanks: str) -> None:
    """The package modulm-a with one driver, the last class in `source`."""
    written = source.format(api=find_kind(kind).api, **blanks)
    attribute = re.findall(r"class (\w+)", written)[-1]
    install("modulm-a", {f"modulm.{kind}": {name: f"mod_a:{attribute}"}}, {"mod_a": written})


def reason(decision, name: str) -> str:
    return str({verdict.name: verdict.reason for verdict in decision.candidates}[name])


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_platform_that_fails_is_a_verdict(install, fault, message):
    install_driver(install, "platforms", "chip", PLATFORM, probe=fault)
    decision = defaults.choose_platform(PluginManager()).decision
    assert decision.winner == "cpu"
    verdict = reason(decision, "chip")
    assert verdict.startswith("platforms/chip (modulm-a 1.0): probe ")
    assert message in verdict


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_method_that_fails_is_a_verdict(install, fault, message):
    install_driver(install, "quantization", "odd", METHOD, claims=fault)
    plugins = PluginManager()
    platform = defaults.choose_platform(plugins, "cpu").driver()
    decision = defaults.choose_quantization(plugins, CheckpointInfo({}), platform).decision
    assert decision.winner == "none"
    assert "quantization/odd (modulm-a 1.0): claims" in reason(decision, "odd")
    assert message in reason(decision, "odd")


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_backend_that_fails_is_a_verdict(install, fault, message):
    install_driver(install, "attention", "a_first", BACKEND, rejects=fault)
    plugins = PluginManager()
    platform = defaults.choose_platform(plugins, "cpu").driver()
    decision = defaults.choose_attention(plugins, SPEC, platform, bind()).decision
    assert decision.winner in platform.attention
    assert "attention/a_first (modulm-a 1.0): refuses" in reason(decision, "a_first")
    assert message in reason(decision, "a_first")


@pytest.mark.parametrize(("fault", "message"), FAULTS)
def test_a_loader_that_fails_is_a_verdict(install, fault, message, tmp_path):
    install_driver(install, "loaders", "a_mine", LOADER, opens=fault)
    plugins = PluginManager()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"loaders/a_mine \(modulm-a 1.0\): opens"):
        defaults.choose_loader(plugins, folder)
    (folder / "config.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    decision = defaults.choose_loader(plugins, folder).decision
    assert decision.winner == "safetensors"
    assert message in reason(decision, "a_mine")


def test_the_same_driver_asked_for_by_name_is_an_error(install, caplog):
    install_driver(install, "platforms", "chip", PLATFORM, probe=RAISES[0])
    with caplog.at_level(logging.DEBUG), pytest.raises(PluginBroken) as error:
        defaults.choose_platform(PluginManager(), "chip")
    assert str(error.value) == "platforms/chip (modulm-a 1.0): probe raised: ValueError: boom"
    record = next(r for r in caplog.records if r.exc_info)
    assert record.levelno == logging.DEBUG


def test_equal_scores_are_this_projects(install):
    install_driver(install, "platforms", "chip", PLATFORM, probe="return Probe(1, 'me too')")
    decision = defaults.choose_platform(PluginManager()).decision
    assert decision.winner == "cpu"


def test_an_untouched_template_takes_no_machine(install, tmp_path):
    from modulm_command_plugins.template import names_of, rendered

    files = rendered(names_of("platforms", "achip"))
    install(
        "modulm-platform-achip",
        {"modulm.platforms": {"achip": "modulm_platform_achip:AchipPlatform"}},
        {"modulm_platform_achip": files["modulm_platform_achip/__init__.py"]},
    )
    decision = defaults.choose_platform(PluginManager()).decision
    assert decision.winner == "cpu"
    assert "template" in reason(decision, "achip")


@pytest.mark.parametrize("kind", ["platforms", "loaders", "attention"])
def test_two_packages_with_one_name_are_an_error_also_when_nobody_named_it(install, kind, tmp_path):
    name = {"platforms": "cpu", "loaders": "safetensors", "attention": "sdpa"}[kind]
    install("modulm-twin", {f"modulm.{kind}": {name: "mod_twin:X"}}, {"mod_twin": "X = 1"})
    plugins = PluginManager()
    choose = {
        "platforms": lambda: defaults.choose_platform(plugins),
        "loaders": lambda: defaults.choose_loader(plugins, tmp_path),
        "attention": lambda: defaults.choose_attention(plugins, SPEC, Cpu, bind()),
    }
    with pytest.raises(PluginConflict, match="provided by .*modulm-twin 1.0.*--plugins=-modulm-"):
        choose[kind]()


OVERRIDES = """
    from modulm.plugins import Declaration, hookimpl

    @hookimpl
    def modulm_platforms():
        return [Declaration("cpu", "mod_chip:Chip", api=1, priority=5)]
"""


def test_a_declaration_that_overrides_is_seen(install):
    install(
        "modulm-over",
        {"modulm": {"over": "mod_over"}},
        {"mod_over": OVERRIDES, "mod_chip": PLATFORM.format(probe="return Probe(1, 'it runs')")},
    )
    decision = defaults.choose_platform(PluginManager()).decision
    assert decision.winner == "cpu"
    assert decision.reason.endswith(
        f"; modulm-over 1.0, in place of modulm-platform-cpu {modulm.__version__}"
    )
    assert defaults.choose_platform(PluginManager(), "cpu").decision.reason == (
        f"asked for by name; modulm-over 1.0, in place of modulm-platform-cpu {modulm.__version__}"
    )


CHOOSES = """
    from modulm.plugins import Choice, hookimpl

    @hookimpl
    def modulm_choose_platform(probes):
        {answer}
"""


def test_whose_choice_it_is_is_said(install):
    source = CHOOSES.format(answer="return Choice('cpu', 'I like it')")
    install("modulm-a", {"modulm": {"picks": "mod_a"}}, {"mod_a": source})
    decision = defaults.choose_platform(PluginManager()).decision
    assert decision.reason == "I like it; chosen by picks (modulm-a 1.0)"
    source = CHOOSES.format(answer="return Choice('cuda', 'I like it')")
    install("modulm-b", {"modulm": {"z_dreams": "mod_b"}}, {"mod_b": source})
    with pytest.raises(UnsupportedError, match=r"z_dreams \(modulm-b 1.0\) chose cuda"):
        defaults.choose_platform(PluginManager())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("return 'cpu'", "it returned 'cpu', which is not a Choice"),
        ("return Choice(None, 'why')", "TypeError"),
        ("raise SystemExit(1)", "SystemExit"),
    ],
)
def test_an_answer_that_is_no_choice_counts_for_nothing(install, caplog, answer, message):
    install("modulm-a", {"modulm": {"picks": "mod_a"}}, {"mod_a": CHOOSES.format(answer=answer)})
    decision = defaults.choose_platform(PluginManager()).decision
    assert decision.winner == "cpu"
    assert "plugin picks (modulm-a 1.0) raised an error in modulm_choose_platform" in caplog.text
    assert message in caplog.text


ANSWERS = """
    from modulm.plugins import hookimpl

    @hookimpl
    def {hook}(config):
        return {answer}
"""


@pytest.mark.parametrize(
    ("hook", "answer", "arguments"),
    [
        ("modulm_report_header", "'one line'", {"config": None}),
        ("modulm_report_header", "5", {"config": None}),
        ("modulm_report_header", "[5]", {"config": None}),
        ("modulm_config_proposals", "[('dtype', 'float16')]", {"config": None}),
        ("modulm_logits_steps", "[print]", {"config": None, "vocabulary": 5}),
    ],
)
def test_lists_of_something_else_count_for_nothing(install, caplog, hook, answer, arguments):
    source = ANSWERS.format(hook=hook, answer=answer)
    install("modulm-a", {"modulm": {"talks": "mod_a"}}, {"mod_a": source})
    manager = PluginManager()
    assert isinstance(manager.gather(hook, **arguments), list)
    assert f"plugin talks (modulm-a 1.0) raised an error in {hook} and is disabled" in caplog.text
    assert "which is no" in caplog.text


def test_a_hook_that_stops_a_start_says_whose_it_is(install):
    source = (
        "from modulm.plugins import hookimpl\n@hookimpl\ndef modulm_config_final(config): 1 / 0"
    )
    install("modulm-a", {"modulm": {"late": "mod_a"}}, {"mod_a": source})
    with pytest.raises(PluginBroken, match=r"hooks/late \(modulm-a 1.0\): modulm_config_final"):
        PluginManager().config_final(EngineConfig())


def test_a_refusal_stays_what_it_is(install):
    source = """
        from modulm.errors import ConfigError
        from modulm.plugins import hookimpl

        @hookimpl
        def modulm_config_final(config):
            raise ConfigError("dtype", "not on this cluster")
    """
    install("modulm-a", {"modulm": {"late": "mod_a"}}, {"mod_a": source})
    with pytest.raises(ConfigError, match="not on this cluster"):
        PluginManager().config_final(EngineConfig())


def test_an_import_that_takes_long_is_named_and_ended(install, driver, monkeypatch, caplog):
    source = "import threading\nthreading.Event().wait(60)"
    install("modulm-a", {"modulm.schedulers": {"slow": "mod_a:X"}}, {"mod_a": source})
    monkeypatch.setattr(calls, "_SLOW", 0.01)
    monkeypatch.setattr(calls, "_GIVEN_UP", 0.3)
    with pytest.raises(PluginBroken, match=r"schedulers/slow \(modulm-a 1.0\).*TimeoutError: took"):
        PluginManager().load("schedulers", "slow")
    message = "schedulers/slow (modulm-a 1.0) is still being imported after 0.01 s"
    assert f"{message}; to leave it out: --plugins=-modulm-a" in caplog.text


def test_an_import_that_waits_for_another_package_is_not_blamed(install, monkeypatch, caplog):
    install("modulm-a", {"modulm.schedulers": {"slow": "mod_a:X"}}, {
        "mod_a": "import mod_heavy",
        "mod_heavy": "import threading\nthreading.Event().wait(60)",
    })  # fmt: skip
    monkeypatch.setattr(calls, "_SLOW", 0.01)
    monkeypatch.setattr(calls, "_GIVEN_UP", 0.3)
    with pytest.raises(PluginBroken, match="TimeoutError: took"):
        PluginManager().load("schedulers", "slow")
    assert "still being imported after 0.01 s, at work in mod_heavy" in caplog.text
    assert "--plugins" not in caplog.text


def test_what_an_import_changes_for_others_is_named_at_the_start(install, driver, caplog):
    changes = """
    import signal, sys, torch
    sys.setrecursionlimit(4321)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(torch.get_num_threads() + 1)
    """
    install("modulm-a", {"modulm.schedulers": {"one": "mod_a:Shortest"}}, {"mod_a": driver})
    install(
        "modulm-b", {"modulm.schedulers": {"two": "mod_b:Shortest"}}, {"mod_b": changes + driver}
    )
    threads, limit = torch.get_num_threads(), sys.getrecursionlimit()
    before = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    watch_imports()
    try:
        manager = PluginManager()
        manager.load("schedulers", "one")
        assert "for everything in this process" not in caplog.text
        manager.load("schedulers", "two")
    finally:
        del calls.watchers[1:]
        sys.setrecursionlimit(limit)
        signal.signal(signal.SIGUSR2, before)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert (
        "schedulers/two (modulm-b 1.0) changes Python's recursion limit, the handler of SIGUSR2, "
        "torch's default dtype, torch's deterministic algorithms, torch's number of threads, for "
        "everything in this process"
    ) in caplog.text


def test_what_a_plugin_prints_goes_to_standard_error(install, driver, capfd):
    source = "print('at import')\n" + "\n".join(line[4:] for line in driver.splitlines())
    install("modulm-a", {"modulm.schedulers": {"loud": "mod_a:Shortest"}}, {"mod_a": source})
    assert PluginManager().load("schedulers", "loud").name == "shortest"
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == "at import\n"


def test_an_error_is_blamed_on_the_package_whose_code_raised_it(install, driver):
    source = driver + "\n\n    def fails():\n        return {}['key']\n"
    install("modulm-a", {"modulm.schedulers": {"odd": "mod_a:Shortest"}}, {"mod_a": source})
    manager = PluginManager()
    manager.load("schedulers", "odd")
    with pytest.raises(KeyError) as raised:
        sys.modules["mod_a"].fails()
    blamed = calls.blame(raised.value, manager.everything())
    assert str(blamed).startswith("schedulers/odd (modulm-a 1.0): fails (")
    assert str(blamed).endswith("raised: KeyError: 'key'")
    with pytest.raises(ZeroDivisionError) as other:
        1 / 0  # noqa: B018
    assert calls.blame(other.value, manager.everything()) is None


def test_a_package_with_a_misspelt_group_is_named(install, driver):
    install("modulm-a", {"modulm.scheduler": {"shortest": "mod_a:Shortest"}}, {"mod_a": driver})
    with pytest.raises(PluginNotFound, match="modulm-a 1.0 offers it as 'scheduler', which is no"):
        PluginManager().load("schedulers", "shortest")


@pytest.fixture
def explained(install, tmp_path) -> dict[str, dict[str, object]]:
    """What `modulm explain` says, as JSON, with one package that fails and prints everywhere."""
    points = {
        "modulm": {"loud": "mod_a"},
        "modulm.platforms": {"chip": "mod_chip:Chip"},
        "modulm.quantization": {"odd": "mod_odd:Odd"},
        "modulm.attention": {"a_first": "mod_first:First"},
        "modulm.loaders": {"a_mine": "mod_mine:Mine"},
    }
    fault = "print('noise'); raise ValueError('boom')"
    modules = {
        "mod_a": "print('noise')\n"
        + CHOOSES.format(answer="print('noise'); return 5").replace("\n    ", "\n"),
        "mod_chip": PLATFORM.format(probe=fault),
        "mod_odd": METHOD.format(api=find_kind("quantization").api, claims=fault),
        "mod_first": BACKEND.format(api=find_kind("attention").api, rejects=fault),
        "mod_mine": LOADER.format(api=find_kind("loaders").api, opens=fault),
    }
    install("modulm-a", points, modules)
    command = [sys.executable, "-m", "modulm", "explain", "--json"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "noise" in done.stderr
    return {d["subject"].partition(" (")[0]: d for d in json.loads(done.stdout)}


def test_explain_with_everything_broken_at_once(explained):
    for subject, name in (
        ("device", "chip"), ("quantization", "odd"), ("attention", "a_first"), ("loader", "a_mine")
    ):  # fmt: skip
        reason_shown = {v["name"]: v["reason"] for v in explained[subject]["candidates"]}[name]
        assert "(modulm-a 1.0)" in reason_shown, subject
        assert "ValueError: boom" in reason_shown, subject
    assert explained["device"]["winner"] == "cpu"


def test_collect_env_with_a_platform_that_fails(install):
    from modulm_command_collect_env.command import command

    install_driver(install, "platforms", "chip", PLATFORM, probe=RAISES[0])
    with using(PluginManager()):
        done = CliRunner().invoke(command, [])
    assert done.exit_code == 0, done.exception
    assert "platforms/chip (modulm-a 1.0): probe raised: ValueError: boom" in done.output


def test_the_engines_process_says_whose_driver_failed(install, driver, monkeypatch, tmp_path):
    source = driver + "\n        def __init__(self):\n            raise ValueError('boom')\n"
    install("modulm-a", {"modulm.schedulers": {"odd": "mod_a:Shortest"}}, {"mod_a": source})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = EngineProcess()
    try:
        config = EngineConfig.from_keywords(scheduling_policy="odd", device="cpu")
        process.start(config, PluginManager())
        with pytest.raises(
            PluginBroken, match=r"schedulers/odd \(modulm-a 1.0\): Shortest.__init__"
        ):
            ProcessCoreClient(process.address, print, print, process)
    finally:
        process.close()


def test_a_slow_import_names_the_package_that_took_the_time(install, driver, monkeypatch, caplog):
    """It is at its own code when it is reported, after another package took most of the time."""
    install("modulm-a", {"modulm.schedulers": {"slow": "mod_a:Shortest"}}, {"mod_a": driver})
    looks = iter(["mod_a"] * 3 + ["mod_heavy"] * 30 + ["mod_a"] * 7)
    monkeypatch.setattr(calls, "_SLOW", 0.0)
    monkeypatch.setattr(calls, "_SAMPLES", 40)
    monkeypatch.setattr(calls, "_working_package", lambda thread: next(looks))
    calls._watch(PluginManager().find("schedulers", "slow"), 0, threading.Event())
    assert "is still being imported after 0 s, at work in mod_heavy" in caplog.text


def test_a_stalled_engine_names_the_plugin_whose_code_it_runs(install):
    """Of a third party, in any hook or driver; nothing is added where none is at work."""
    source = """
        import threading
        from modulm.plugins import hookimpl

        entered, released = threading.Event(), threading.Event()

        @hookimpl
        def modulm_step_finished(stats):
            entered.set()
            released.wait()
    """
    install("modulm-a", {"modulm": {"slow": "mod_a"}}, {"mod_a": source})
    with using(PluginManager()) as manager:
        assert plugin_at_work() == ""
        hooks = manager.hook
        module = sys.modules["mod_a"]
        thread = threading.Thread(target=lambda: hooks.modulm_step_finished(stats=None))
        thread.start()
        try:
            module.entered.wait()
            where = plugin_at_work()
        finally:
            module.released.set()
            thread.join()
    assert where == ", in modulm_step_finished of hooks/slow (modulm-a 1.0)"


@pytest.fixture
def time_of_loops(caplog: pytest.LogCaptureFixture) -> list[float]:
    """The time that a `LoopWatch` reads; what it logs is caught."""
    caplog.set_level(logging.INFO, logger="modulm.server")
    return [100.0]


def test_a_plugin_that_holds_up_the_event_loop_is_named(install, caplog, time_of_loops):
    """While it does, and for how long afterwards; it is not stopped, which only --isolate can."""
    source = """
        from modulm.plugins import hookimpl

        @hookimpl
        def modulm_request_admitted(request, params):
            params.look()
    """
    install("modulm-a", {"modulm": {"slow": "mod_a"}}, {"mod_a": source})
    now = time_of_loops
    watch = LoopWatch(budget=5.0, clock=lambda: now[0])

    def look() -> None:
        for _ in range(4):
            now[0] += 2.0
            watcher = threading.Thread(target=watch.look)
            watcher.start()
            watcher.join()

    with using(PluginManager()) as manager:
        watch._thread = threading.get_ident()
        watch.tick()
        manager.hook.modulm_request_admitted(request=None, params=SimpleNamespace(look=look))
        watch.tick()
    reports = [record.getMessage() for record in caplog.records if record.name == "modulm.server"]
    assert reports == [
        (
            "the server has not answered for 6 s: its event loop is held up, in "
            "modulm_request_admitted of hooks/slow (modulm-a 1.0); `--isolate` limits the time of "
            "hooks, parsers and routes (plugins-isolation)"
        ),
        "the server answers again, after 8.0 s",
    ]


def test_a_server_that_was_stopped_itself_blames_nobody(caplog, time_of_loops):
    now = time_of_loops
    watch = LoopWatch(budget=5.0, clock=lambda: now[0])
    now[0] += 3.0
    watch.look()
    now[0] += 600.0
    watch.look()
    assert caplog.text == ""
    watch.tick()
    assert "the server answers again, after 603.0 s" in caplog.text
