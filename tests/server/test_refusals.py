"""What is refused because it could be read in two ways, or comes from where nobody meant it to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from attrs import evolve

from modulm.config import EngineConfig
from modulm.contracts.tokenizer import Tokenizer
from modulm.plugins import manager
from modulm_frontend.input_processor import InputProcessor
from modulm_server.errors import ApiError
from modulm_server.flags import ServerConfig
from modulm_server.hosts import HostCheck
from modulm_server.scripted import ScriptedEngine, scripted_info
from modulm_server.testing import Live, error_of, serve_in_thread

ServerMaker = Callable[..., Live]

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def locked(make_server: ServerMaker) -> Live:
    return make_server(api_key=("ann", "bob"))


# Credentials.


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Bearer ann"), ("X-Api-Key", "bob")],
        [("Authorization", "Bearer ann"), ("X-Api-Key", "nobody")],
        [("Authorization", "Basic ann"), ("X-Api-Key", "ann")],
        [("Authorization", "Bearer ann"), ("Authorization", "Bearer bob")],
        [("Authorization", "Bearer ann"), ("Authorization", "Bearer ann")],
        [("X-Api-Key", "ann"), ("X-Api-Key", "bob")],
        [("X-Api-Key", "nobody"), ("X-Api-Key", "ann")],
    ],
)
def test_several_keys_are_refused(locked: Live, headers: list[tuple[str, str]]) -> None:
    with locked.client() as client:
        for path in ("/v1/models", "/server_info"):
            answer = client.get(path, headers=headers)
            assert answer.status_code == 400
            assert error_of(answer)["code"] == "ambiguous_credentials"


@pytest.mark.parametrize(
    "headers",
    [
        [("Authorization", "Bearer ann"), ("X-Api-Key", "ann")],
        [("Authorization", "Bearer ann"), ("X-Api-Key", "")],
        [("X-Api-Key", "ann")],
    ],
)
def test_one_key_said_twice_is_one_key(locked: Live, headers: list[tuple[str, str]]) -> None:
    with locked.client() as client:
        assert client.get("/v1/models", headers=headers).status_code == 200


# Bodies that do not claim to be JSON.


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded",
                                  "multipart/form-data; boundary=x", "text/json"])  # fmt: skip
def test_bodies_that_do_not_claim_to_be_json(live: Live, kind: str | None) -> None:
    from json import dumps

    headers = {} if kind is None else {"Content-Type": kind}
    with live.client() as client:
        for path in (CHAT, "/v1/completions", "/v1/embeddings", "/tokenize", "/v1/batches"):
            answer = client.post(path, content=dumps(ASKED).encode(), headers=headers)
            assert answer.status_code == 415, path
            assert "Content-Type: application/json" in error_of(answer)["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8",
                                  "application/problem+json"])  # fmt: skip
def test_bodies_that_do(live: Live, kind: str) -> None:
    from json import dumps

    with live.client() as client:
        body = dumps(ASKED).encode()
        assert client.post(CHAT, content=body, headers={"Content-Type": kind}).status_code == 200
        twice = [("Content-Type", kind), ("Content-Type", "text/plain")]
        assert client.post(CHAT, content=body, headers=twice).status_code == 415


# Hosts and pages.


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/", "/nothing"])
def test_a_foreign_host_on_a_server_without_a_key(live: Live, path: str) -> None:
    """A page that is rebound to 127.0.0.1 speaks under its own name (case S15)."""
    with live.client() as client:
        for host in ("evil.test", "evil.test:8000", "localhost.evil.test", "127.0.0.1.evil.test",
                     "a@localhost", "localhost#", "x y"):  # fmt: skip
            answer = client.get(path, headers={"Host": host})
            assert answer.status_code in (400, 403), host
            if answer.status_code == 403:
                assert error_of(answer)["code"] == "host_not_allowed"
                assert "--allowed-hosts" in error_of(answer)["message"]
        answer = client.post(CHAT, json=ASKED, headers={"Host": "evil.test"})
        assert answer.status_code == 403


def test_hosts_that_are_meant(live: Live) -> None:
    with live.client() as client:
        for host in ("localhost", "LOCALHOST:8000", "localhost.", "a.localhost", "127.0.0.1",
                     "127.1.2.3:80", "[::1]:8000", "192.0.2.7"):  # fmt: skip
            assert client.get("/health", headers={"Host": host}).status_code == 200, host
    assert b"200 OK" in live.raw(b"GET /health HTTP/1.0\r\n\r\n")


def test_two_hosts_are_refused_everywhere(live: Live, locked: Live) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n"
    for server in (live, locked):
        assert server.raw(head + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 400")


def check(host_header: str, **flags: Any) -> int:
    """The status of a request with this Host; 200 where the check lets it through."""
    keys = bool(flags.get("api_key"))
    config = EngineConfig.from_keywords(**flags).group(ServerConfig)
    scope = {"method": "GET", "headers": [(b"host", host_header.encode())]}
    try:
        HostCheck.of(config, keys).check(scope)
    except ApiError as error:
        return error.status
    return 200


def test_who_is_checked_is_who_has_no_other_protection(tmp_path: Any) -> None:
    assert check("evil.test", api_key=("k",)) == 200
    open_to_all = {"host": "0.0.0.0", "allow_unauthenticated": True}
    assert check("evil.test", **open_to_all) == 403
    assert check("192.0.2.7:8000", **open_to_all) == 200
    assert check("lan.test", **open_to_all, allowed_hosts=("lan.test",)) == 200
    assert check("evil.test", uds=str(tmp_path / "socket")) == 200
    assert check("evil.test", host="::1") == 403
    assert check("evil.test") == 403


def test_hosts_that_a_flag_names() -> None:
    hosts = {"allowed_hosts": ("api.test", "*.mine.test")}
    for flags in (hosts, {**hosts, "api_key": ("k",)}, {**hosts, "host": "0.0.0.0"}):
        for host, status in (("api.test", 200), ("API.test:80", 200), ("a.b.mine.test", 200),
                             ("localhost", 200), ("mine.test", 403), ("xmine.test", 403),
                             ("evil.test", 403), ("192.0.2.7", 403)):  # fmt: skip
            assert check(host, **flags) == status, (host, flags)
    assert check("evil.test", allowed_hosts=("*",)) == 200


def test_names_are_checked_on_every_interface(make_server: ServerMaker) -> None:
    """`--host 0.0.0.0 --allow-unauthenticated`: by name only those that a flag lists."""
    flags = {"host": "0.0.0.0", "allow_unauthenticated": True, "allowed_hosts": ("lan.test",)}
    form = {"files": {"file": ("x", b"x")}, "data": {"purpose": "batch"}}
    with make_server(**flags).client() as client:
        for host, status in (("lan.test", 200), ("lan.test:8000", 200), ("evil.test", 403)):
            answer = client.post(CHAT, json=ASKED, headers={"Host": host})
            assert answer.status_code == status, host
        for origin, status in (("http://lan.test", 200), ("http://evil.test", 403)):
            headers = {"Host": "lan.test", "Origin": origin}
            answer = client.post("/v1/files", headers=headers, **form)
            assert answer.status_code == status, origin


def test_pages_of_other_origins_send_nothing(live: Live, locked: Live) -> None:
    """Browsers send forms and empty bodies to any server without asking it first."""
    form = {"files": {"file": ("x", b"x")}, "data": {"purpose": "batch"}}
    own_origin = str(httpx.URL(live.url))
    with live.client() as client:
        for origin in ("https://evil.test", "http://evil.test:8000", "null"):
            answer = client.post("/v1/files", headers={"Origin": origin}, **form)
            assert answer.status_code == 403
            assert error_of(answer)["code"] == "origin_not_allowed"
            assert client.get("/v1/models", headers={"Origin": origin}).status_code == 200
        for origin in (own_origin, "http://localhost:3000", "vscode-webview://x"):
            answer = client.post("/v1/files", headers={"Origin": origin}, **form)
            assert answer.status_code == 200, origin
    with locked.client(headers={"Authorization": "Bearer ann"}) as client:
        answer = client.post("/v1/files", headers={"Origin": "https://evil.test"}, **form)
        assert answer.status_code == 200


def test_origins_that_a_flag_names(make_server: ServerMaker) -> None:
    with make_server(allowed_origins=("https://good.test",)).client() as client:
        form = {"files": {"file": ("x", b"x")}, "data": {"purpose": "batch"}}
        for origin, status in (("https://good.test", 200), ("https://evil.test", 403)):
            answer = client.post("/v1/files", headers={"Origin": origin}, **form)
            assert answer.status_code == status


# Fields.


@pytest.mark.parametrize("count", [-1, 0, 5])
def test_prompt_logprobs_cannot_be_streamed(live: Live, count: int) -> None:
    with live.client() as client:
        for path, request in ((CHAT, ASKED), ("/v1/completions", {"prompt": "hi"})):
            body = {**request, "prompt_logprobs": count, "stream": True}
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            assert error_of(answer)["param"] == "prompt_logprobs"
            if count >= 0:
                assert client.post(path, json={**body, "stream": False}).status_code == 200


def test_prompts_are_texts_or_ids(make_server: ServerMaker) -> None:
    both = make_server(info={"tasks": ("generate", "embed", "classify")})
    mixed = ["hello", [5, 6]], [[5, 6], "hello"], ["hello", [5], "x"]
    with both.client() as client:
        for prompt in mixed:
            answer = client.post("/v1/completions", json={"prompt": prompt})
            assert answer.status_code == 400
            assert error_of(answer)["param"] == "prompt"
            for path in ("/v1/embeddings", "/classify"):
                answer = client.post(path, json={"input": prompt})
                assert answer.status_code == 400, path
                assert error_of(answer)["param"] == "input"
            answer = client.post("/pooling", json={"input": prompt, "task": "embed"})
            assert answer.status_code == 400


def test_a_tokenizer_without_a_chat_template_is_explained(tokenizer: Tokenizer) -> None:
    """F38."""
    bare = evolve(tokenizer, chat_template=None)
    config = EngineConfig.from_keywords(model="M", disable_uvicorn_access_log=True)
    engine = ScriptedEngine(bare, info=scripted_info(bare, config=config))
    with serve_in_thread(engine, config) as live, live.client() as client:
        chat = {"model": "M", "messages": [{"role": "user", "content": "hi"}]}
        refused = client.post("/v1/chat/completions", json=chat)
        assert refused.status_code == 400
        assert "no chat template" in error_of(refused)["message"]
        plain = client.post("/v1/completions", json={"model": "M", "prompt": "hi"})
        assert plain.status_code == 200


def test_a_tokenizer_with_more_ids_than_the_model_is_warned_of(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """F38: with both numbers; one of the same size is not."""
    config = EngineConfig.from_keywords(model="M")
    for vocabulary in (len(tokenizer), len(tokenizer) - 8):
        info = scripted_info(tokenizer, config=config, vocabulary=vocabulary)
        InputProcessor(info, tokenizer, manager.current())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "modulm"]
    assert f"The tokenizer has {len(tokenizer)} ids and the model {len(tokenizer) - 8}." in line


def test_paths_behind_flags_are_served_with_them(make_server: ServerMaker) -> None:
    """Those of one model; `--models-config` and `--enable-lora` need other servers."""
    live = make_server(server_dev_mode=True, enable_tokenizer_info_endpoint=True)
    with live.client() as http:
        served = set(http.get("/openapi.json").json()["paths"])
    families = [manager.current().load("routes", d.name) for d in manager.current().names("routes")]
    flagged = {path: flags for each in families for path, flags in each.flagged_paths.items()}
    assert {"/sleep", "/pause", "/v1/load_lora_adapter", "/models/load"} <= set(flagged)
    others = {"--enable-lora and --allow-runtime-lora-updating", "--models-config or --models-dir"}
    assert not {path for path, flags in flagged.items() if flags not in others} - served
