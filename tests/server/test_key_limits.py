"""Keys with names, models, weights and limits: what each may do, and how it is refused."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from modulm.config import EngineConfig
from modulm.errors import ConfigError
from modulm_server.api_keys import KeyFile, allows, read_keys
from modulm_server.flags import ServerConfig
from modulm_server.generation import GenerationService
from modulm_server.key_limits import Bucket
from modulm_server.testing import Live

ServerMaker = Callable[..., Live]

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
FILE = f"""
keys:
  - {{name: ann, key: secret-of-ann, weight: 3}}
  - name: bob
    sha256: [{sha256(b"old").hexdigest()}, {sha256(b"new").hexdigest()}]
    requests_per_minute: 4
    tokens_per_minute: 1000
  - {{name: claude, key: secret-of-claude, requests_per_minute: 9, tokens_per_minute: 500}}
  - {{name: quick, key: secret-of-quick, requests_per_minute: 1}}
  - {{name: spent, key: secret-of-spent, tokens_per_minute: 1}}
  - {{name: other, key: secret-of-other, models: ["other-*"]}}
  - {{name: few, key: secret-of-few, connections: 2, streams: 1}}
"""


@pytest.fixture(scope="module")
def live(make_server: ServerMaker, tmp_path_factory: pytest.TempPathFactory) -> Live:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(FILE)
    return make_server(api_keys_file=str(file), enable_log_requests=True)


def post(live: Live, key: str, path: str = CHAT, **body: Any) -> httpx.Response:
    with live.client(headers={"Authorization": f"Bearer {key}"}) as client:
        return client.post(path, json={"messages": MESSAGES, **body})


def test_a_keys_name_and_weight_reach_the_engine_and_the_key_no_log(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    live.engine.tenants.clear()
    with caplog.at_level(logging.INFO):
        assert post(live, "secret-of-ann").status_code == 200
        assert post(live, "old").status_code == post(live, "new").status_code == 200
        assert post(live, "secret-of-nobody").status_code == 401
    ann, old, new = live.engine.tenants
    assert (ann.weight, old.weight) == (3.0, 1.0)
    assert ann.name != old.name == new.name, "an entry may have several keys"
    assert " of ann: " in caplog.text
    assert "secret" not in caplog.text
    assert "secret" not in ann.name


def test_responses_tell_what_is_left(live: Live) -> None:
    headers = post(live, "old").headers
    assert headers["x-ratelimit-limit-requests"] == "4"
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert 0 <= int(headers["x-ratelimit-remaining-requests"]) < 4
    assert 0 < int(headers["x-ratelimit-remaining-tokens"]) < 1000
    assert headers["x-ratelimit-reset-tokens"].endswith("s")
    assert not [name for name in post(live, "secret-of-ann").headers if "ratelimit" in name]


def test_rates_on_anthropics_routes_have_its_names_too(live: Live) -> None:
    headers = post(live, "secret-of-claude", "/v1/messages", max_tokens=4).headers
    for kind, limit in (("requests", "9"), ("tokens", "500")):
        name = f"anthropic-ratelimit-{kind}"
        assert headers[f"{name}-limit"] == headers[f"x-ratelimit-limit-{kind}"] == limit
        assert 0 <= int(headers[f"{name}-remaining"]) < int(limit)
        reset = datetime.fromisoformat(headers[f"{name}-reset"])
        assert timedelta(minutes=-5) < reset - datetime.now(UTC) < timedelta(minutes=5)
    assert not [name for name in post(live, "secret-of-claude").headers if "anthropic" in name]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {}),
        ("/v1/messages", {"max_tokens": 4}),
        ("/api/chat", {"model": "M", "stream": False}),
        ("/completion", {"prompt": "hi"}),
    ],
)
def test_refusals_have_the_shape_of_their_api(live: Live, path: str, body: dict[str, Any]) -> None:
    """Of requests and of tokens per minute."""
    post(live, "secret-of-quick")
    post(live, "secret-of-spent", max_tokens=8)
    for key in ("secret-of-quick", "secret-of-spent"):
        refused = post(live, key, path, **body)
        assert refused.status_code == 429, refused.text
        wait = int(refused.headers["Retry-After"])
        assert 0 < wait <= (60 if key == "secret-of-quick" else 3600)
        error = refused.json()["error"]
        if path == "/api/chat":
            assert "per minute" in error
        else:
            assert "per minute" in error["message"]
            assert refused.json().get("type") == ("error" if path == "/v1/messages" else None)
        if path == CHAT:
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")


def test_models_of_others_do_not_exist(live: Live) -> None:
    refused = post(live, "secret-of-other")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    key = read_keys(_flags(live)).find(b"secret-of-other")
    assert allows(key, "other-7b")
    assert not allows(key, "M")
    assert allows(None, "M")


def _flags(live: Live) -> ServerConfig:
    return live.engine.info.config.group(ServerConfig)


def test_one_keys_streams_and_connections_refuse_only_itself(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [{"role": "user", "content": "count slowly"}], "stream": True}
    with ExitStack() as stack:
        few = stack.enter_context(live.client(headers={"Authorization": "Bearer secret-of-few"}))
        first = stack.enter_context(few.stream("POST", CHAT, json=body))
        assert first.status_code == 200
        with monkeypatch.context() as patch:  # refused before its prompt costs anything
            patch.delattr(GenerationService, "from_messages")
            second = few.post(CHAT, json=body)
        assert (second.status_code, second.headers["Retry-After"]) == (429, "1")
        assert "streams" in second.json()["error"]["message"]
        assert few.post(CHAT, json={"messages": MESSAGES}).status_code == 200
        assert post(live, "secret-of-ann").status_code == 200
    until = time.monotonic() + 300  # the server notices the end a moment later
    while (again := post(live, "secret-of-few", stream=True)).status_code == 429:
        assert time.monotonic() < until, "a stream that has ended does not count"
        time.sleep(0.02)
    assert again.status_code == 200


def test_a_changed_file_is_read_again_and_a_wrong_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("modulm_server.api_keys._LOOK", 0.0)
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [{name: ann, key: one}]\n")
    file = KeyFile(str(path))

    def change(text: str) -> list[str]:
        path.write_text(text)
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
        return [key.name for key in file.refresh()]

    assert change("keys: [{name: ann, key: one}, {name: bob, key: two}]\n") == ["ann", "bob"]
    assert change("keys:\n  - {name: ann, key: secret}\n    weight: [\n") == ["ann", "bob"]
    assert f"{path}, line 3" in caplog.text
    path.unlink()
    assert len(file.refresh()) == 2
    assert "secret" not in caplog.text
    assert change("keys: [{name: eve, key: three}]\n") == ["eve"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "one field, keys"),
        ("keys: []", "one field, keys"),
        ("keys: [3]", "line 1: an entry: it must have fields"),
        ("keys:\n- name: a", "line 2: key: is required"),
        ("keys:\n- key: a", "line 2: name: is required"),
        ("keys:\n- name: a\n  key: 5", "line 3: key: must be text"),
        ("keys:\n- name: a\n  sha256: xyz", "line 3: sha256: must be 64 hex"),
        ("keys:\n- name: a\n  key: s3cret\n  wieght: 3", "line 2: an entry: unknown option wieght"),
        ("keys:\n- name: a\n  key: s3cret\n  weight: 0", "line 4: weight: must be from"),
        ("keys:\n- name: a\n  key: s3cret\n  weight: .nan", "line 4: weight: NaN"),
        ("keys:\n- name: a\n  key: s3cret\n  streams: 0", "line 4: streams: must be at least 1"),
        ("keys:\n- name: a\n  key: s3cret\n  streams: many", "line 4: streams: 'many'"),
        ("keys:\n- {name: a, key: x}\n- name: a\n  key: s3cret", "line 3: name: 'a' is the name"),
        ("keys:\n- {name: a, key: s3cret}\n- name: b\n  key: s3cret", "line 4: key: it is listed"),
        ("keys: {", "line 1"),
    ],
)
def test_errors_name_line_and_field_and_never_a_key(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    config = EngineConfig.from_keywords(api_keys_file=str(path)).group(ServerConfig)
    with pytest.raises(ConfigError) as error:
        read_keys(config)
    assert message in str(error.value)
    assert "s3cret" not in str(error.value)
    assert error.value.__cause__ is None or "s3cret" not in str(error.value.__cause__)


def test_a_bucket_fills_evenly_and_may_be_overdrawn() -> None:
    now = 100.0
    bucket = Bucket(lambda: now)
    bucket.set_limit(60)
    assert (bucket.remaining, bucket.reset, bucket.wait(60)) == (60, 0, 0)
    bucket.take(90)
    assert (bucket.remaining, bucket.reset) == (0, 90)
    assert bucket.wait(1) == 31
    assert bucket.wait(1000) == 90, "what is larger than the bucket waits for a full one"
    now = 131.0
    assert bucket.wait(1) == 0
    bucket.set_limit(120)
    assert bucket.remaining == 61, "a raised limit takes effect at once"
