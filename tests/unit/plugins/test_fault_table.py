"""What is promised for each kind of plugin and fault: the table of docs/plugins-threats.md.

A bystander's faults in hooks are tried here in every hook; in processes of their own, every kind
that can be isolated gets every fault. Other kinds have tests of their own, named in `ELSEWHERE`.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm.contracts.parser import ParseContext
from modulm.contracts.requests import StepStats
from modulm.contracts.sampling import RowView, SamplingParams
from modulm.errors import PluginBroken
from modulm.plugins import PluginManager, hookimpl, hookspecs
from modulm.plugins.hooks import _KINDS_OF, Hooks
from modulm.plugins.manager import using
from modulm.plugins.selection import Selection
from modulm.testing.checkpoints import make_tokenizer
from modulm_isolation import IsolationError, Limits
from modulm_isolation import process as isolated_process
from modulm_isolation.hook_plugins import HOOKS as ISOLATED
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_server.testing import error_of, serve_in_thread
from modulm_tokenizers.tokenizer import load_tokenizer

HOOKS = [name for name in hookspecs.__all__ if name.startswith("modulm_")]


def plugin_of(hook: str, body: str) -> object:
    """A hook plugin with one implementation."""
    names = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    scope: dict[str, object] = {}
    exec(f"def {hook}({', '.join(names)}):\n    {body}\n", scope)
    return type("Plugin", (), {hook: staticmethod(hookimpl(scope[hook]))})()


@pytest.mark.parametrize("body", ["raise ValueError('boom')", "raise SystemExit('boom')"])
def test_a_bystander_that_raises_in_any_hook_is_named_and_switched_off(body, caplog):
    for hook in HOOKS:
        caplog.clear()
        hooks, plugin, other = Hooks(), plugin_of(hook, body), plugin_of(hook, "calls.append(1)")
        if hook in _KINDS_OF:
            with pytest.raises(PluginBroken, match="hook plugin bystander: boom"):
                hooks.add(plugin, "bystander")
            assert not hooks.has(plugin)
            continue
        calls: list[int] = []
        getattr(other, hook).__globals__["calls"] = calls
        hooks.add(other, "other")
        hooks.add(plugin, "bystander")
        arguments = dict.fromkeys(inspect.signature(getattr(hookspecs, hook)).parameters)
        call = getattr(hooks.relay, hook)
        if hook in hookspecs.STOPPING:
            historic = getattr(hookspecs, hook).modulm_spec.get("historic")
            with pytest.raises(PluginBroken, match=rf"hooks/bystander: {hook} raised an error"):
                call.call_historic(kwargs=arguments) if historic else call(**arguments)
            continue
        assert not call(**arguments)
        assert calls == [1]
        assert f"plugin bystander raised an error in {hook} and is disabled" in caplog.text
        assert (hooks.has(plugin), hooks.has(other)) == (False, True)


FAULTS = """
    import os, sys, threading

    def fault(name):
        if name == "raise":
            raise ValueError("boom")
        if name == "hang":
            threading.Event().wait()
        if name == "exit":
            os._exit(3)
        if name == "leave":
            sys.exit(4)
        if name == "eat":
            bytearray(1 << 40)
        if name == "fork":
            os.fork()
"""
PROCESSOR = """
    from mod_faults import fault
    from modulm.contracts.sampling import LogitsProcessor

    class Faulty(LogitsProcessor):
        api = 1
        fields = ("extra_args",)

        def admit(self, view):
            return True

        def apply_row(self, view, logits):
            fault(view.params.extra_args["fault"])
            return logits + 1
"""
HOOK = """
    from mod_faults import fault
    from modulm.plugins import hookimpl

    @hookimpl
    def modulm_report_header(config):
        return ["a line"]

    @hookimpl
    def modulm_request_finished(request, reason):
        fault(request)
"""
PARSER = """
    from mod_faults import fault
    from modulm.contracts.parser import Content, Example, ToolParser

    class Faulty(ToolParser):
        name = "faulty"
        api = 1
        examples = (Example("hello", content="hello"),)

        def feed(self, text, ids=()):
            fault(text.strip())
            return [Content(text)]

        def finish(self):
            return []
"""
KINDS = {
    "logits_processors": ("modulm.logits_processors", "faulty", "mod_a:Faulty", PROCESSOR),
    "hooks": ("modulm", "faulty", "mod_a", HOOK),
    "tool_parsers": ("modulm.tool_parsers", "faulty", "mod_a:Faulty", PARSER),
}
#: Fault -> the message, and whether the process ends.
PROMISED = {
    "raise": ("raised ValueError: boom", False),
    "hang": ("took more than 0.05 s", True),
    "exit": ("ended with exit code 3", True),
    "leave": ("raised SystemExit: 4", False),
    "eat": ("raised MemoryError", False),
    "fork": ("may not start processes", False),
}
CASES = [(kind, fault) for kind in KINDS for fault in PROMISED]
TERM = "modulm-a:timeout=300:memory=1GiB"


@pytest.fixture
def isolated(install):
    """Installs a package of a kind, and returns a manager that isolates it."""

    def make(kind: str) -> PluginManager:
        group, name, target, source = KINDS[kind]
        install("modulm-a", {group: {name: target}}, {"mod_a": source, "mod_faults": FAULTS})
        return PluginManager(Selection.parse(f"~{TERM}"))

    yield make
    isolated_process.close_all()


def hurried(monkeypatch, fault: str) -> None:
    """Give a call that will hang little time, and any other much."""
    process = isolated_process._by_package["modulm-a", TERM]
    monkeypatch.setattr(process, "_limits", Limits(0.05 if fault == "hang" else 300.0, 1 << 30))


@parametrize_sample(("kind", "fault"), CASES, every=6)
def test_a_fault_in_a_process_of_its_own_is_named_and_others_go_on(
    kind, fault, isolated, monkeypatch, caplog
):
    manager = isolated(kind)
    message, ends = PROMISED[fault]
    error = IsolationError if ends else PluginBroken
    if kind == "hooks":
        assert "a line" in manager.gather("modulm_report_header", config=None)
        hurried(monkeypatch, fault)
        manager.notify("modulm_request_finished", request=fault, reason="stop")
        assert message in caplog.text
        hurried(monkeypatch, "")
        lines = manager.gather("modulm_report_header", config=None)
        assert ("a line" in lines) == ends  # one that raises is switched off, as always
        return
    driver = manager.load(kind, "faulty")
    if kind == "tool_parsers":
        parser = driver(ParseContext())
        hurried(monkeypatch, fault)
        with pytest.raises(error, match=message):
            parser.feed(fault)
        hurried(monkeypatch, "")
        assert driver(ParseContext()).feed("fine")[0].text == "fine"
        return
    processor = driver.open(EngineConfig(), 8, torch.device("cpu"))
    views = [
        RowView(row, SamplingParams(extra_args={"fault": name}), [1], [])
        for row, name in enumerate((fault, "none"))
    ]
    assert all(map(processor.admit, views))
    hurried(monkeypatch, fault)
    with pytest.raises(error, match=message):
        processor.apply_row(views[0], torch.zeros(8))
    hurried(monkeypatch, "")
    if ends:
        with pytest.raises(PluginBroken, match="its process ended while this request ran"):
            processor.apply_row(views[1], torch.zeros(8))
        assert processor.admit(views[1])
    assert torch.equal(processor.apply_row(views[1], torch.zeros(8)), torch.ones(8))


#: Arguments of hooks that can be isolated.
ARGUMENTS = {
    "architectures": ["Any"],
    "config": EngineConfig(),
    "error": ValueError("an error"),
    "params": SamplingParams(),
    "reason": "stop",
    "request": "one",
    "stats": StepStats(3, 1, 2, 0.5),
}


@parametrize_sample("fault", [*PROMISED], every=6)
def test_a_fault_in_any_isolated_hook_leaves_the_others(fault, install, monkeypatch, caplog):
    names = {hook: [*inspect.signature(getattr(hookspecs, hook)).parameters] for hook in HOOKS}
    source = "from mod_faults import fault\nfrom modulm.plugins import hookimpl\n" + "".join(
        f"@hookimpl\ndef {hook}({', '.join(names[hook])}):\n    fault({fault!r})\n"
        for hook in ISOLATED
    )
    install("modulm-a", {"modulm": {"faulty": "mod_a"}}, {"mod_a": source, "mod_faults": FAULTS})
    message, ends = PROMISED[fault]
    for hook in sorted(ISOLATED):
        caplog.clear()
        manager, calls = PluginManager(Selection.parse(f"~{TERM}")), []
        other = plugin_of(hook, "calls.append(1)")
        getattr(other, hook).__globals__["calls"] = calls
        manager.add(other, "other")
        hurried(monkeypatch, fault)
        given = {name: ARGUMENTS[name] for name in names[hook]}
        if hook == "modulm_choose_model":
            given["config"] = {}
        call = getattr(manager.hook, hook)
        historic = getattr(hookspecs, hook).modulm_spec.get("historic")
        if hook in hookspecs.STOPPING:
            with pytest.raises(PluginBroken, match=message):
                call.call_historic(kwargs=given) if historic else call(**given)
        else:
            call(**given)
            assert message in caplog.text, hook
            assert calls == [1], hook
        process = isolated_process._by_package["modulm-a", TERM]
        assert (process.pid is None) == ends, hook
        hurried(monkeypatch, "")
        process._ends.clear()  # the waits have a test of their own
    isolated_process.close_all()


def test_a_server_answers_while_its_isolated_parser_ends(isolated, tmp_path):
    manager = isolated("tool_parsers")
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer"))
    replies = ["exit", "fine"]
    engine = ScriptedEngine(
        tokenizer, lambda prompt, params: Reply(replies.pop(0)), scripted_info(tokenizer)
    )
    config = EngineConfig.from_keywords(
        model="M", enable_auto_tool_choice=True, tool_call_parser="faulty"
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"model": "M", "messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    with (
        using(manager),
        serve_in_thread(engine, config) as live,
        live.client() as client,
    ):
        failed = client.post("/v1/chat/completions", json=body)
        assert failed.status_code == 500
        assert error_of(failed)["code"] == "plugin_failed"
        assert (
            "tool_parsers/faulty (modulm-a 1.0): the process of modulm-a 1.0 ended"
            in (error_of(failed)["message"])
        )
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"].strip() == "fine"
        assert client.get("/health").status_code == 200


def test_step_statistics_reach_a_hook_whole(isolated):
    stats = StepStats(3, 1, 2, 0.5, accepted_at=(1, 2))
    from modulm_isolation.hook_plugins import _pack_stats, _unpack
    from modulm_wire.packing import decode, encode

    assert _unpack(decode(encode(_pack_stats(stats)))) == stats


def test_the_page_has_every_kind():
    page = Path(__file__).resolve().parents[3] / "docs" / "plugins-threats.md"
    table = page.read_text(encoding="utf-8").partition("## Failures, by kind")[2]
    first = " ".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE))
    for words in ("Hooks", "Parsers", "Logits processors", "Route families", "Stat loggers",
                  "IO processors", "Commands", "All other drivers"):  # fmt: skip
        assert words in first
