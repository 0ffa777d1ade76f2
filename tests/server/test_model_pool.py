"""Which models are loaded and unloaded when, on a server whose engines are scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from attrs import evolve
from click.testing import CliRunner
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tests.server.scripted_models import Several, several_models, write_models

from modulm.config import EngineConfig
from modulm.config.sources import keywords
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import ConfigError
from modulm_command_models import commands
from modulm_server.app import create_app
from modulm_server.metrics import HttpMetrics
from modulm_server.models.flags import parse_duration, parse_size
from modulm_server.models.hosted_model import HostedModel
from modulm_server.models.pool import _is_expired
from modulm_server.models.serve import make_pool
from modulm_server.scripted import Reply, ScriptedEngine
from modulm_server.testing import error_of

CHAT = "/v1/chat/completions"
KEYS = [{"Authorization": f"Bearer {key}"} for key in "ab"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "models.yaml"
    write_models(file, "one: {}", "two: {aliases: [deux]}", "three: {sleep: true}", "broken: {}")
    return file


@pytest.fixture
def several(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, file: Path) -> Iterator[Several]:
    def reply(prompt: str, params: Any) -> Reply:
        slowly = "slowly" in prompt
        return Reply("1 2 3 ", delay=0.002, endless=True) if slowly else Reply("Hello.")

    flags: dict[str, Any] = {"models_config": str(file), "load_comment_interval": 0.01}
    with several_models(tokenizer, monkeypatch, reply=reply, **flags) as server:
        yield server


def ask(model: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def post(server: Several, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(server.live.url + path, json=body, headers=headers, timeout=300)


def test_the_longest_unused_model_makes_room(several: Several) -> None:
    several.pool.budget = 250
    for name in ("one", "two"):
        several.call(several.pool.load(name))
    assert post(several, "/api/generate", {"model": "one"}).is_success
    several.call(several.pool.load("three"))
    assert list(several.states().values()) == ["loaded", "unloaded", "loaded", "unloaded"]
    several.sizes["two"] = 200  # more than estimated: others make room afterwards
    several.call(several.pool.load("deux"))
    assert list(several.states().values()) == ["unloaded", "loaded", "sleeping", "unloaded"]
    several.sizes["one"] = 300
    answer = post(several, "/models/load", {"model": "one"})
    assert (answer.status_code, error_of(answer)["code"]) == (503, "model_load_failed")
    assert "Set --flag 0, or --memory-budget 1MiB" in error_of(answer)["message"]
    several.call(several.pool.load("two"))
    model = several.model("two")
    model.settings = evolve(model.settings, pinned=True)
    answer = post(several, CHAT, ask("three"))
    assert answer.status_code == 503
    assert "pinned" in answer.text
    assert several.states()["two"] == "loaded"


def test_a_model_that_can_never_fit_unloads_no_other(several: Several) -> None:
    several.pool.budget = 250
    several.call(several.pool.load("one"))
    several.model("two").needed = 251
    answer = post(several, CHAT, ask("two"))
    assert answer.status_code == 503
    assert "it needs 0 MiB, and --memory-budget has 0 of 0 MiB for it" in answer.text
    assert several.states()["one"] == "loaded"


def test_memory_that_cannot_be_measured_keeps_no_model_for_ever(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is measured again, and models go on to expire."""
    monkeypatch.setattr("modulm_server.models.pool._MEASURE", 0.01)
    several.pool.budget = 1000
    several.call(several.pool.load("one"))
    tries = []

    async def fail(model: HostedModel) -> None:
        tries.append(model.name)
        raise OSError("no room for a process")

    monkeypatch.setattr(HostedModel, "measure", fail)
    assert post(several, "/api/generate", {"model": "one", "keep_alive": 0.5}).is_success
    until = time.monotonic() + 300
    while several.states()["one"] != "unloaded":
        assert time.monotonic() < until, "the model stays"
        time.sleep(0.01)
    assert len(tries) > 1


def test_no_jump_of_the_clock_unloads_a_model(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long a model stays is monotonic time; the time of day is only shown."""
    answer = post(several, "/api/generate", {"model": "one", "keep_alive": "10m"})
    assert answer.is_success
    model, now = several.model("one"), time.time()
    for jump in (1e9, -1e9):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        assert not _is_expired(model, time.monotonic())
        assert model.status().expires_at == pytest.approx(now + jump + 600, abs=300)
    assert _is_expired(model, time.monotonic() + 601)


def test_a_running_stream_ends_before_its_model_makes_room(several: Several) -> None:
    several.pool.budget = 100
    body = ask("one", "slowly", stream=True, max_tokens=40)
    with httpx.stream("POST", several.live.url + CHAT, json=body, timeout=300) as stream:
        lines = stream.iter_lines()
        while not next(lines).startswith("data: "):
            pass  # a comment, while the model is loaded
        loading = asyncio.run_coroutine_threadsafe(several.pool.load("two"), several.live.loop)
        rest = list(lines)
    assert '"finish_reason":"length"' in "".join(rest)
    assert loading.result(300).state == "loaded"
    assert several.states()["one"] == "unloaded"


def test_requests_for_two_models_with_room_for_one_are_all_answered(several: Several) -> None:
    several.pool.budget = 100

    async def crowd() -> list[int]:
        async with httpx.AsyncClient(base_url=several.live.url, timeout=300) as http:
            bodies = [ask(name) for _ in range(5) for name in ("one", "two")]
            answers = [http.post(CHAT, json=body) for body in bodies]
            return [answer.status_code for answer in await asyncio.gather(*answers)]

    assert asyncio.run(crowd()) == [200] * 10
    assert sum(several.model(name).loads for name in ("one", "two")) <= 10


def test_a_model_that_sleeps_wakes_up_instead_of_loading(several: Several) -> None:
    model = several.model("three")
    assert post(several, CHAT, ask("three")).is_success
    several.call(several.pool._leave(model, evicted=True))
    assert (several.states()["three"], model.memory) == ("sleeping", 10)
    assert post(several, CHAT, ask("three")).is_success
    assert (several.states()["three"], model.loads) == ("loaded", 1)


def test_a_full_queue_refuses_and_a_failed_load_says_why(several: Several) -> None:
    model = several.model("one")
    model.waiters = set(range(256))
    try:
        answer = post(several, CHAT, ask("one"))
    finally:
        model.waiters = set()
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    answer = post(several, CHAT, ask("broken"))
    assert (answer.status_code, error_of(answer)["code"]) == (503, "model_load_failed")
    assert "the file is cut" in answer.text
    assert "the file is cut" in post(several, "/api/chat", ask("broken")).json()["error"]
    stream = post(several, "/v1/messages", ask("broken", stream=True, max_tokens=4))
    assert "the file is cut" in stream.text
    assert post(several, CHAT, ask("one")).is_success


def test_reloading_drops_no_stream(several: Several, file: Path) -> None:
    body = ask("one", "slowly", stream=True, max_tokens=40)
    with httpx.stream("POST", several.live.url + CHAT, json=body, timeout=300) as stream:
        lines = stream.iter_lines()
        while not next(lines).startswith("data: "):
            pass
        write_models(file, "one: {max-model-len: 64}", "two: {aliases: [deux]}", "new: {}")
        changes = {"added": ["new"], "changed": ["one"], "removed": ["three", "broken"]}
        assert post(several, "/models/reload", {}).json() == changes
        assert '"finish_reason":"length"' in "".join(lines)
    assert post(several, CHAT, ask("one")).is_success
    cards = httpx.get(f"{several.live.url}/v1/models").json()["data"]
    lengths = {card["id"]: card["max_model_len"] for card in cards}
    assert lengths == {"one": 64, "two": None, "deux": None, "new": None}
    file.write_text("models: {}\n")
    assert error_of(post(several, "/models/reload", {}))["param"] == "models_config"


def test_checkpoints_added_to_the_folder_are_served_without_reload(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def add(*parts: str) -> None:
        folder = tmp_path.joinpath(*parts)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr("modulm_server.models.pool._LOOK_AGAIN", 0.0)
    with several_models(tokenizer, monkeypatch, models_dir=str(tmp_path)) as several:
        assert httpx.get(f"{several.live.url}/v1/models").json()["data"] == []
        assert "there is no model yet" in error_of(post(several, CHAT, ask("first")))["message"]
        add("first")
        assert post(several, CHAT, ask("second")).status_code == 404
        add("second")
        assert post(several, CHAT, ask("second")).is_success
        cached = tmp_path / "models--owner--third--b"
        add(cached.name, "snapshots", "abc")
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("abc")
        several.call(several.pool.discover())
        assert list(several.states()) == ["first", "second", "owner/third--b"]
        (tmp_path / "first" / "config.json").unlink()
        assert not several.call(several.pool.discover())
        assert post(several, CHAT, ask("first")).is_success


def test_commands_list_load_and_stop_models(several: Several) -> None:
    def run(command: click.Command, *arguments: str) -> str:
        result = CliRunner().invoke(command, [*arguments, "--url", several.live.url])
        assert result.exit_code == 0, result.output
        return result.output

    assert run(commands.load, "deux") == "two: loaded, 0 MiB\n"
    rows = [line.split() for line in run(commands.ps).splitlines()]
    assert [row[0] for row in rows] == ["NAME", "one", "two", "three", "broken"]
    assert rows[2][1] == "loaded"
    assert run(commands.stop, "two") == "two: unloaded\n"
    assert run(commands.reload) == "nothing has changed\n"
    failed = CliRunner().invoke(commands.load, ["nobody", "--url", several.live.url])
    assert failed.exit_code == 1
    assert "only one, two, three, broken" in failed.output


def test_metrics_of_a_server_of_one_model_are_there_for_each_of_several(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    """Those of HTTP and of the process itself are the server's."""
    flags: dict[str, Any] = {"server_dev_mode": True, "tool_call_parser": "hermes"}
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    one = create_app(ScriptedEngine(tokenizer), keywords(**flags).config)
    registry = one.families[0].context.registry
    own = CollectorRegistry(auto_describe=False)
    HttpMetrics(own)
    names = {family.name for family in registry.collect()}
    names -= {family.name for family in own.collect()}
    flags |= {"models_config": str(file), "api_key": ["a", "b"]}
    with several_models(tokenizer, monkeypatch, reply=lambda *_: Reply(call), **flags) as server:
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        for name in ("one", "two"):
            assert post(server, CHAT, ask(name, tools=tools), **KEYS[0]).is_success
            assert post(server, f"/sleep?model={name}", None, **KEYS[0]).is_success
        text = httpx.get(f"{server.live.url}/metrics", headers=KEYS[0]).text
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert names <= families.keys()
    for name in names:
        labels = [sample.labels for sample in families[name].samples]
        assert {each["model_name"] for each in labels} in ({"one", "two"}, set()), name
    for name in ("tool_call_parser_invocations", "sleep_mode_operation_duration_seconds"):
        assert families[f"modulm:{name}"].samples


def test_keys_choose_models(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    write_models(file, "one: {api_keys: [a]}", "two: {}")
    flags: dict[str, Any] = {"models_config": str(file), "api_key": ["a", "b"]}
    with several_models(tokenizer, monkeypatch, **flags) as server:
        assert post(server, CHAT, ask("one")).status_code == 401
        assert [post(server, CHAT, ask("one"), **key).status_code for key in KEYS] == [200, 404]
        assert post(server, CHAT, ask("two"), **KEYS[1]).is_success
        assert post(server, "/models/load", {"model": "one"}, **KEYS[1]).status_code == 404
        for path in ("/v1/models", "/api/tags"):
            listed = httpx.get(server.live.url + path, headers=KEYS[1]).text
            assert '"two"' in listed
            assert '"one"' not in listed


def test_settings_that_are_wrong_name_the_model(file: Path) -> None:
    base = EngineConfig.from_keywords(models_config=str(file))
    for table, message in (
        ("a: {port: 1}", "whole server"),
        ("a: {sleep: 3}", "0, 1 or 2"),
        ("a: {keep_alive: soon}", "duration"),
        ("a: {api_keys: [x]}", "not one of the server"),
        ("a: {max_model_len: x}", "max_model_len"),
        ("a: {no_such_flag: 1}", "no_such_flag"),
        ("a: {aliases: [b]}\n  b: {}", "a name of 'a' too"),
    ):
        write_models(file, table)
        with pytest.raises(ConfigError, match=message) as raised:
            make_pool(base, ())
        assert raised.value.field == "models_config"


def test_sizes_and_durations() -> None:
    sizes = {"8GiB": 8 << 30, "500MB": 500_000_000, "1.5k": 1500, "77": 77, 5: 5, None: None}
    assert {text: parse_size(text) for text in sizes} == sizes
    times = {"90": 90, "10m": 600, "1h30m": 5400, "-1": None, -1: None, "-5m": None, 0: 0}
    assert {text: parse_duration(text) for text in times} == times
    for wrong in ("", "soon", "1x", True, [], "nan"):
        with pytest.raises(ValueError, match="duration"):
            parse_duration(wrong)
    for wrong in ("0", "-1", "8 apples", True):
        with pytest.raises(ValueError, match="size|byte"):
            parse_size(wrong)
