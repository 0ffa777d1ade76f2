"""Packages that run in processes of their own: results, faults, restarts, and what is enforced."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from modulm.config import EngineConfig
from modulm.contracts.parser import ParseContext
from modulm.contracts.requests import StepStats
from modulm.contracts.sampling import RowView, SamplingParams
from modulm.errors import ConfigError, PluginBroken, RequestError
from modulm.plugins import PluginManager
from modulm.plugins.manager import using
from modulm.plugins.selection import Selection
from modulm.testing.checkpoints import make_tokenizer
from modulm.testing.logits import check_logits_processor
from modulm_isolation import IsolationError, Limits, check_isolation, parse_term
from modulm_isolation import process as isolated_process
from modulm_isolation.hooks import modulm_config_final
from modulm_isolation.needs import Needs, needs_of
from modulm_parsing.testing import check_parser, events_of
from modulm_server.command import command as serve
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_server.testing import serve_in_thread
from modulm_tokenizers.tokenizer import load_tokenizer

PARSER = """
    import os, sys, time
    from modulm.contracts.parser import Content, Example, ToolParser

    class Faulty(ToolParser):
        name = "faulty"
        api = 1
        examples = (Example("hello", content="hello"),)

        def feed(self, text, ids=()):
            self.seen = getattr(self, "seen", "") + text
            if text == "raise":
                raise ValueError("boom")
            if text == "hang":
                while True:
                    pass
            if text == "exit":
                os._exit(3)
            if text == "leave":
                sys.exit(4)
            if text == "eat":
                return [Content(str(len(bytearray(1 << 32))))]
            if text == "fork":
                os.fork()
            if text == "connect":
                import socket
                socket.create_connection(("127.0.0.1", 9))
            if text == "read":
                return [Content(open({secret!r}).read())]
            if text == "write":
                open({secret!r}, "w").write("mine")
            if text == "kill":
                os.kill(os.getppid(), 9)
            if text == "environment":
                return [Content(os.environ.get("MY_API_KEY", "nothing"))]
            if text == "all":
                return [Content(self.seen)]
            if text == "tokens":
                return [Content(str(self.context.tokenizer.encode("abc")))]
            return []

        def finish(self):
            return []
"""


@pytest.fixture(autouse=True)
def _close():
    yield
    isolated_process.close_all()


@pytest.fixture
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "secret"
    path.write_text("the secret")
    return path


@pytest.fixture
def faulty(install, secret, monkeypatch):
    """The class that stands for a parser that does as the text says."""
    monkeypatch.setenv("MY_API_KEY", "sesame")
    points = {"modulm.tool_parsers": {"faulty": "mod_a:Faulty"}}
    install("modulm-a", points, {"mod_a": PARSER.replace("{secret!r}", repr(str(secret)))})
    manager = PluginManager(Selection.parse("~modulm-a:timeout=300:memory=256MiB"))
    return manager.load("tool_parsers", "faulty")


def read(parser, text: str) -> str:
    return "".join(event.text for event in parser.feed(text))


FAULTS = {
    "raise": (PluginBroken, "feed raised ValueError: boom"),
    "hang": (IsolationError, "feed took more than 0.05 s"),
    "exit": (IsolationError, "ended with exit code 3 in feed"),
    "leave": (PluginBroken, "feed raised SystemExit: 4"),
    "eat": (PluginBroken, "feed raised MemoryError"),
    "fork": (PluginBroken, "may not start processes"),
    "connect": (PluginBroken, "may not use the network"),
    "read": (PluginBroken, "Permission denied"),
    "write": (PluginBroken, "may not write"),
    "kill": (PluginBroken, "PermissionError"),
}


def test_faults_of_a_parser_name_it_and_the_next_message_is_read(faulty, secret, monkeypatch):
    other = faulty(ParseContext())
    assert read(other, "one ") == ""
    for text, (error, message) in FAULTS.items():
        faulty.remote.process._ends.clear()  # the waits have a test of their own
        parser = faulty(ParseContext())
        if text == "hang":
            monkeypatch.setattr(faulty.remote.process, "_limits", Limits(timeout=0.05))
        with pytest.raises(error, match=message) as raised:
            read(parser, text)
        monkeypatch.setattr(faulty.remote.process, "_limits", Limits(300.0, 1 << 28))
        assert "tool_parsers/faulty (modulm-a 1.0)" in str(raised.value)
        assert read(faulty(ParseContext()), "all") == "all"
    assert read(other, "two ") == ""
    assert read(other, "all") == "one two all"
    assert read(other, "environment") == "nothing"
    assert secret.read_text() == "the secret"
    assert faulty.remote.process.restarts == 2


def test_a_process_that_keeps_ending_waits_and_then_stays_away(faulty, monkeypatch):
    process, now = faulty.remote.process, [0.0]
    monkeypatch.setattr(process, "_clock", lambda: now[0])

    def end() -> None:
        with pytest.raises(IsolationError, match="exit code 3"):
            read(faulty(ParseContext()), "exit")

    end()
    end()
    with pytest.raises(IsolationError, match="modulm-a 1.0 is started again in 0.5 s"):
        faulty(ParseContext())
    now[0] = 1.0
    assert read(faulty(ParseContext()), "all") == "all"
    process._ends.extend([now[0]] * 7)
    process.end()
    with pytest.raises(IsolationError, match="ended 8 times in 10 minutes"):
        faulty(ParseContext())
    now[0] = 700.0
    assert read(faulty(ParseContext()), "all") == "all"


def test_a_parser_may_ask_for_the_tokenizer(faulty, tmp_path):
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer"))
    parser = faulty(ParseContext(tokenizer=tokenizer))
    assert read(parser, "tokens") == str(tokenizer.encode("abc"))


DRY = {"dry_multiplier": 0.8, "dry_allowed_length": 1}


def isolated(kind: str, name: str, package: str) -> type:
    return PluginManager(Selection.parse(f"~{package}:timeout=300")).load(kind, name)


def test_an_isolated_parser_gives_the_same_events():
    plain = PluginManager().load("tool_parsers", "hermes")
    apart = isolated("tool_parsers", "hermes", "modulm-parser-hermes")
    assert apart.examples == plain.examples
    assert apart.special_tokens == plain.special_tokens
    for example in plain.examples:
        text = example.text
        for pieces in ([text], [text[i : i + 5] for i in range(0, len(text), 5)]):
            assert events_of(apart, example, pieces) == events_of(plain, example, pieces)
    context = plain.examples[0].context
    assert apart(context).structural_tag() == plain(context).structural_tag()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "name", "package"),
    [
        ("tool_parsers", "hermes", "modulm-parser-hermes"),
        ("reasoning_parsers", "deepseek_r1", "modulm-parser-deepseek"),
    ],
)
def test_isolated_parsers_pass_their_kit(kind, name, package):
    check_parser(isolated(kind, name, package))


def test_an_isolated_logits_processor_gives_the_same_bits():
    plain = PluginManager().load("logits_processors", "dry")
    apart = isolated("logits_processors", "dry", "modulm-logits-dry")
    assert apart.fields == plain.fields
    params = SamplingParams(extra_args=DRY, seed=1)
    check_logits_processor(apart, sample=[params])
    view = RowView(3, params, [5, 6, 7, 8, 5, 6, 7], [8, 5, 6])
    logits = torch.randn(2, 48, generator=torch.Generator().manual_seed(1))
    results = []
    for cls in (plain, apart):
        processor = cls.open(EngineConfig(), 48, torch.device("cpu"))
        assert processor.admit(view)
        results.append(processor.apply([view], logits.clone(), [1]))
    assert torch.equal(*results)
    assert not torch.equal(results[0], logits)
    apart.remote.process.end()
    with pytest.raises(PluginBroken, match="its process ended while this request ran"):
        processor.apply_row(view, logits[1])
    assert processor.admit(view)
    assert torch.equal(processor.apply_row(view, logits[1].clone()), results[0][1])


def test_an_isolated_logits_processor_refuses_parameters():
    apart = isolated("logits_processors", "dry", "modulm-logits-dry")
    wrong = SamplingParams(extra_args={"dry_multiplier": "much"})
    with pytest.raises(RequestError) as raised:
        apart.validate_for(wrong, None)
    with pytest.raises(RequestError) as here:
        PluginManager().load("logits_processors", "dry").validate_for(wrong, None)
    assert (str(raised.value), raised.value.param) == (str(here.value), here.value.param)


HOOKS = """
    import os
    from modulm.plugins import Proposal, hookimpl

    @hookimpl
    def modulm_report_header(config):
        return [f"in another process: {os.getpid()}", str(config and config.device.device)]

    @hookimpl
    def modulm_config_proposals(config):
        return [Proposal("dtype", "float32", "a test")]

    @hookimpl
    def modulm_step_finished(stats):
        if stats.step == 7:
            os._exit(9)

    @hookimpl
    def modulm_request_finished(reason):
        raise ValueError(reason)
"""


def test_hooks_in_a_process_of_their_own(install, caplog):
    install("modulm-a", {"modulm": {"talks": "mod_a"}}, {"mod_a": HOOKS})
    manager = PluginManager(Selection.parse("~modulm-a:timeout=300"))
    header = manager.gather("modulm_report_header", config=EngineConfig.from_keywords(device="cpu"))
    process = isolated_process._by_package["modulm-a", "modulm-a:timeout=300"]
    assert [f"in another process: {process.pid}", "cpu"] == header[-2:]
    (proposal,) = manager.gather("modulm_config_proposals", config=EngineConfig())
    assert (proposal.field, proposal.value) == ("dtype", "float32")
    for step in (6, 7, 8):
        manager.notify("modulm_step_finished", stats=StepStats(step, 1, 0, 0.5))
    assert process.restarts == 1
    assert "hooks/talks (modulm-a 1.0): the process of modulm-a 1.0 ended with exit code 9" in (
        caplog.text
    )
    manager.notify("modulm_request_finished", request="r", reason="boom")
    assert "plugin talks (modulm-a 1.0) raised an error in modulm_request_finished" in caplog.text
    assert "call raised ValueError: boom" in caplog.text
    assert "talks" not in str(manager.gather("modulm_report_header", config=None))


def test_a_hook_that_gets_objects_of_the_engine_is_refused(install):
    source = "from modulm.plugins import hookimpl\n@hookimpl\ndef modulm_app_created(app): pass"
    install("modulm-a", {"modulm": {"front": "mod_a"}}, {"mod_a": source})
    manager = PluginManager(Selection.parse("~modulm-a:timeout=300"))
    with pytest.raises(PluginBroken, match=r"hooks/front \(modulm-a 1.0\) cannot run in a process"):
        manager.load_hooks()


ROUTES = """
    import os, sys, threading
    from fastapi import APIRouter, Request
    from fastapi.responses import StreamingResponse
    from modulm_server.route import RouteFamily

    class Family(RouteFamily):
        name = "mine"
        api = 2

        def router(self):
            router = APIRouter()
            router.add_api_route("/mine/{what}", self.answer, methods=["GET", "POST"])
            return router

        async def start(self):
            self.started = True

        async def answer(self, request: Request, what: str):
            if what == "raise":
                raise ValueError("boom")
            if what == "hang":
                threading.Event().wait()
            if what == "exit":
                os._exit(3)
            if what == "leave":
                sys.exit(4)
            if what == "eat":
                bytearray(1 << 40)
            if what == "fork":
                os.fork()
            if what == "stream":
                return StreamingResponse(iter([b"a" * 9, b"b"]), 201, {"x-mine": "yes"})
            if what == "engine":
                self.context.engine.abort
            body = (await request.body()).decode()
            return [self.context.models, what, request.query_params.get("q"), body, self.started]
"""


@pytest.fixture
def routes(install, tmp_path_factory, monkeypatch):
    """A client of a server whose family runs in a process of its own, and that process."""
    install("modulm-a", {"modulm.routes": {"mine": "mod_a:Family"}}, {"mod_a": ROUTES})
    tokenizer = load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    engine = ScriptedEngine(tokenizer, lambda prompt, params: Reply(), scripted_info(tokenizer))
    term = "modulm-a:timeout=300"
    with (
        using(PluginManager(Selection.parse(f"~{term}"))),
        serve_in_thread(engine, EngineConfig.from_keywords(model="M")) as live,
        live.client() as client,
    ):
        yield client, isolated_process._by_package["modulm-a", term]


def test_isolated_routes(routes, monkeypatch):
    client, process = routes
    assert client.get("/mine/x?q=1").json() == [["M"], "x", "1", "", True]
    assert client.post("/mine/x", content=b"y" * 3_000_000).json()[3] == "y" * 3_000_000
    stream = client.get("/mine/stream")
    assert (stream.status_code, stream.text, stream.headers["x-mine"]) == (
        201,
        "a" * 9 + "b",
        "yes",
    )
    for fault in ("raise", "leave", "eat", "fork"):
        assert client.get(f"/mine/{fault}").status_code == 500, fault
        assert client.get("/mine/x").status_code == 200, fault
    refused = client.get("/mine/engine").json()["error"]
    assert "runs in another process has no context.engine" in refused["message"]
    assert process.restarts == 0
    for fault, message in (("exit", "its process ended"), ("hang", "took more than 0.05 s")):
        if fault == "hang":
            monkeypatch.setattr(process, "_limits", Limits(timeout=0.05))
        failed = client.get(f"/mine/{fault}")
        assert failed.status_code == 500
        assert failed.json()["error"]["code"] == "plugin_failed"
        assert "routes/mine (modulm-a 1.0)" in failed.json()["error"]["message"]
        assert message in failed.json()["error"]["message"]
        monkeypatch.setattr(process, "_limits", Limits(300.0))
        process._ends.clear()
        assert client.get("/health").status_code == 200
        assert client.get("/mine/x").json()[1:] == ["x", None, "", True]
    assert process.restarts == 2


def test_what_cannot_be_isolated_is_refused(install, driver):
    points = {"modulm.schedulers": {"one": "mod_a:Shortest"}}
    install("modulm-a", points, {"mod_a": driver})
    with pytest.raises(
        ConfigError, match=r"schedulers/one \(modulm-a 1.0\) cannot run in a process"
    ):
        check_isolation(["modulm-a"], PluginManager())
    with pytest.raises(
        ConfigError, match="no installed package is called 'one'; 'one' is of modulm-a"
    ):
        check_isolation(["one"], PluginManager())
    with using(PluginManager()):
        answer = CliRunner().invoke(serve, ["--isolate", "modulm-a"])
    assert "--isolate: schedulers/one (modulm-a 1.0) cannot run in a process" in answer.output
    with using(PluginManager()), pytest.raises(ConfigError, match=r"configure\('~modulm-a'\)"):
        modulm_config_final(EngineConfig.from_keywords(isolate=["modulm-a"]))


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ("a:time=3", "'time' is no setting; settings are timeout and memory"),
        ("a:memory=much", "'much' is not a size"),
        ("a:timeout=0", "a limit that is not above 0"),
        (":timeout=1", "has no name"),
    ],
)
def test_terms_that_are_wrong(term, message):
    with pytest.raises(ConfigError, match=message) as raised:
        parse_term(term)
    assert raised.value.field == "isolate"


def test_terms_and_manifests_set_limits(install, tmp_path):
    assert parse_term("a:timeout=0.5:memory=1.5GiB") == ("a", Limits(0.5, 3 << 29))
    folder = install("modulm-a", {}, {})
    (folder / "pkg_a").mkdir()
    (folder / "pkg_a" / "__init__.py").touch()
    (folder / "pkg_a" / "modulm.toml").write_text(
        'memory = "512MiB"\n[needs]\nnetwork = ["*"]\nfiles = ["/var/cache"]'
    )
    assert needs_of("pkg_a.sub:X") == Needs(True, False, ("/var/cache",), 512 << 20)
    assert needs_of("json:X") == Needs()
