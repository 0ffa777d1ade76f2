"""Files and batches through the official client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from modulm_route_files.clock import Clock
from modulm_server.testing import Live, error_of

ServerMaker = Callable[..., Live]

CHAT = "/v1/chat/completions"


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def line(name: Any, **fields: Any) -> bytes:
    body = {"model": "M", "messages": [{"role": "user", "content": "hi"}]}
    whole = {"custom_id": name, "method": "POST", "url": CHAT, "body": body, **fields}
    return json.dumps(whole).encode()


def finished(client: openai.OpenAI, identity: str) -> Any:
    for _ in range(30_000):
        batch = client.batches.retrieve(identity)
        if batch.status in ("completed", "failed", "cancelled"):
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def records(client: openai.OpenAI, identity: str | None) -> dict[str, Any]:
    text = client.files.content(identity).text if identity else ""
    rows = [json.loads(part) for part in text.splitlines()]
    return {record["custom_id"]: record for record in rows}


def test_a_batch(client: openai.OpenAI) -> None:
    source = client.files.create(
        file=("jobs.jsonl", b"\n".join(line(f"job-{i}") for i in range(50))), purpose="batch"
    )
    batch = client.batches.create(
        input_file_id=source.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
    )
    done = finished(client, batch.id)
    assert done.status == "completed"
    assert (done.request_counts.total, done.request_counts.completed) == (50, 50)
    assert done.error_file_id is None
    answers = records(client, done.output_file_id)
    assert set(answers) == {f"job-{i}" for i in range(50)}
    for record in answers.values():
        message = record["response"]["body"]["choices"][0]["message"]
        assert message["content"] == "Hello there."
    assert batch.id in [entry.id for entry in client.batches.list()]


def test_a165_bad_lines_do_not_hurt_the_others(client: openai.OpenAI) -> None:
    lines = [
        b"\xef\xbb\xbf" + line("good-1") + b"\r",
        b'{"custom_id": "cut", ',
        line("good-1"),
        line("no-url", url=None),
        line("elsewhere", url="/../admin"),
        line("far", url="http://127.0.0.1:1/v1/chat/completions"),
        line("streamed", body={"model": "M", "messages": [], "stream": True}),
        line("wrong", body={"model": "M", "messages": [{"role": "wizard", "content": "x"}]}),
        b"",
        line(5),
        line("good-2"),
    ]
    source = client.files.create(file=("x", b"\n".join(lines)), purpose="batch")
    batch = client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
    done = finished(client, batch.id)
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 8)
    assert set(records(client, done.output_file_id)) == {"good-1", "good-2"}
    bad = client.files.content(done.error_file_id or "").text.splitlines()
    assert len(bad) == 8
    wrong = records(client, done.error_file_id)["wrong"]
    assert wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == "messages"


def test_a_batch_can_be_cancelled(client: openai.OpenAI, live: Live) -> None:
    slow = {"model": "M", "messages": [{"role": "user", "content": "count slowly"}]}
    source = client.files.create(
        file=("x", b"\n".join(line(f"{i}", body=slow) for i in range(5))), purpose="batch"
    )
    batch = client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
    assert client.batches.cancel(batch.id).status == "cancelled"
    for _ in range(30_000):
        if not live.engine.active:
            break
        time.sleep(0.01)
    assert live.engine.active == 0


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_batch_fails(client: openai.OpenAI, content: bytes) -> None:
    source = client.files.create(file=("x", content), purpose="batch")
    batch = client.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
    assert finished(client, batch.id).status == "failed"


def test_a169_names_of_files_are_never_paths(client: openai.OpenAI, http: httpx.Client) -> None:
    file_card = client.files.create(file=("../../x.html", b"<script>"), purpose="batch")
    answer = http.get(f"/v1/files/{file_card.id}/content")
    assert answer.content == b"<script>", answer.text
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert "x.html" not in answer.headers["content-disposition"]
    assert file_card.id in [file.id for file in client.files.list()]
    client.files.delete(file_card.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file_card.id)
    for name in ("..%2f..%2fetc%2fpasswd", "file-", "*"):
        assert http.get(f"/v1/files/{name}/content").status_code == 404


PURPOSES: Any = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")


def test_files_of_every_purpose(client: openai.OpenAI) -> None:
    by_purpose = {
        purpose: client.files.create(file=("data.bin", purpose.encode()), purpose=purpose)
        for purpose in PURPOSES
    }
    for purpose, file in by_purpose.items():
        assert (file.purpose, file.bytes, file.status) == (purpose, len(purpose), "processed")
        assert client.files.retrieve(file.id) == file
        assert client.files.content(file.id).read() == purpose.encode()
        listed = [card.id for card in client.files.list(purpose=purpose)]
        assert listed[0] == file.id
        assert not set(listed) & {other.id for p, other in by_purpose.items() if p != purpose}
    month = 30 * 24 * 3600
    assert by_purpose["batch"].expires_at == by_purpose["batch"].created_at + month
    assert by_purpose["vision"].expires_at is None
    for file in by_purpose.values():
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(file.id)


def test_files_page_by_page(make_server: ServerMaker) -> None:
    live = make_server()
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client:
        ids = [client.files.create(file=(f"{i}", b"x"), purpose="evals").id for i in range(5)]
        assert [file.id for file in client.files.list(order="asc")] == ids
        assert [file.id for file in client.files.list(limit=2)] == ids[::-1], "every page"
        page = client.files.list(limit=2, after=ids[3])
        assert ([file.id for file in page.data], page.has_more) == ([ids[2], ids[1]], True)
        for query in ({"limit": "0"}, {"limit": "10001"}, {"order": "up"}, {"after": "x"}):
            with pytest.raises(openai.BadRequestError) as caught:
                client.files.list(extra_query=query)
            assert caught.value.param == next(iter(query))
        source = client.files.create(file=("x", b""), purpose="batch").id
        batches = [
            client.batches.create(input_file_id=source, endpoint=CHAT, completion_window="24h").id
            for _ in range(3)
        ]
        assert [batch.id for batch in client.batches.list(limit=1)] == batches[::-1]
        with pytest.raises(openai.BadRequestError, match="purpose batch"):
            client.batches.create(input_file_id=ids[0], endpoint=CHAT, completion_window="24h")


def test_files_that_expire(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    hour: Any = {"anchor": "created_at", "seconds": 3600}
    brief = client.files.create(file=("x", b"x"), purpose="user_data", expires_after=hour)
    assert brief.expires_at == brief.created_at + 3600
    lasting = client.files.create(file=("x", b"x"), purpose="user_data")
    source = client.files.create(file=("x", line("1")), purpose="batch")
    batch = finished(
        client,
        client.batches.create(
            input_file_id=source.id,
            endpoint=CHAT,
            completion_window="24h",
            output_expires_after=hour,
        ).id,
    )
    assert client.files.retrieve(batch.output_file_id).expires_at is not None
    later = Clock().uptime() + 3601
    monkeypatch.setattr(Clock, "uptime", lambda clock: later)
    for deleted in (brief.id, batch.output_file_id):
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(deleted)
    listed = {file.id for file in client.files.list()}
    assert lasting.id in listed
    assert brief.id not in listed


@pytest.mark.parametrize(
    "expiry",
    [
        {"anchor": "created_at", "seconds": 3599},
        {"anchor": "created_at", "seconds": 2_592_001},
        {"anchor": "created_at"},
        {"anchor": "last_active_at", "seconds": 3600},
        {"anchor": "created_at", "seconds": "soon"},
        "tomorrow",
    ],
)
def test_times_that_files_cannot_have(
    client: openai.OpenAI, http: httpx.Client, expiry: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("x", b"x"), purpose="user_data", expires_after=expiry)
    assert caught.value.param == "expires_after"
    source = client.files.create(file=("x", line("1")), purpose="batch")
    body = {"input_file_id": source.id, "endpoint": CHAT, "output_expires_after": expiry}
    answer = http.post("/v1/batches", json=body)
    assert error_of(answer)["param"] == "output_expires_after"


def test_a026_uploads_that_are_not_files(http: httpx.Client) -> None:
    answer = http.post("/v1/files", json={})
    assert answer.status_code == 415
    answer = http.post("/v1/files", data={"purpose": "batch"}, files={"other": b"x"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "file"
    for purpose in ("batch_output", "fun", ""):
        answer = http.post("/v1/files", data={"purpose": purpose}, files={"file": b"x"})
        assert error_of(answer)["param"] == "purpose"
    parts = [("file", (f"{i}", b"x")) for i in range(1000)]
    answer = http.post("/v1/files", data={"purpose": "batch"}, files=parts)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/../admin"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"metadata": {"a": 5}}, 400, "metadata"),
    ],
)
def test_bad_batches(
    client: openai.OpenAI, http: httpx.Client, fields: Any, status: int, param: str
) -> None:
    source = client.files.create(file=("x", line("1")), purpose="batch")
    body = {"input_file_id": source.id, "endpoint": CHAT, "completion_window": "24h", **fields}
    answer = http.post("/v1/batches", json=body)
    assert answer.status_code == status
    assert error_of(answer)["param"] == param


def test_files_and_batches_belong_to_a_key(make_server: ServerMaker) -> None:
    live = make_server(api_key=("ann", "bob"))

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0)

    ann, bob = client("ann"), client("bob")
    source = ann.files.create(file=("x", line("1")), purpose="batch")
    with pytest.raises(openai.NotFoundError):
        bob.files.content(source.id)
    with pytest.raises(openai.NotFoundError):
        bob.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
    batch = ann.batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")
    assert finished(ann, batch.id).request_counts.completed == 1
    with pytest.raises(openai.NotFoundError):
        bob.batches.retrieve(batch.id)
    assert list(bob.files.list()) == []


def test_models_that_do_not_hear_or_speak_say_so(http: httpx.Client) -> None:
    sound, text = {"files": {"file": b"x"}}, {"json": {"input": "Hello."}}
    for path, body, message in (
        ("transcriptions", sound, "does not transcribe"),
        ("translations", sound, "does not transcribe"),
        ("speech", text, "does not speak"),
    ):
        answer = http.post(f"/v1/audio/{path}", **body)
        assert answer.status_code == 400
        assert message in error_of(answer)["message"]
        assert error_of(answer)["code"] == "unsupported"


def test_developers_routes_behind_their_switch(make_server: ServerMaker) -> None:
    live = make_server(server_dev_mode=True)
    with live.client() as client:
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        assert live.engine.resets == 1
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        for path in ("/sleep", "/wake_up"):
            answer = client.post(path)
            assert answer.status_code == 400
            assert "cannot sleep" in error_of(answer)["message"]
        for path in ("/start_profile", "/stop_profile"):
            answer = client.post(path)
            assert answer.status_code == 400
            assert "not support profiling" in error_of(answer)["message"]
        assert client.post("/v1/load_lora_adapter").status_code == 404


def test_a_key_that_runs_too_many_batches_refuses_no_other(
    make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modulm_route_files.family._BATCHES", 2)
    live = make_server(api_key=("ann", "bob"))
    turns = [{"role": "user", "content": "count slowly"}]
    content = line("slow", body={"model": "M", "messages": turns, "max_tokens": 200})
    parts: Any = {"data": {"purpose": "batch"}, "files": {"file": ("x", content)}}
    answers = []
    with live.client() as http:
        for key in ("ann", "ann", "bob"):
            http.headers["Authorization"] = f"Bearer {key}"
            file = http.post("/v1/files", **parts).json()["id"]
            batch = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
            answers.append((key, http.post("/v1/batches", json=batch)))
        for key, answer in answers:
            http.headers["Authorization"] = f"Bearer {key}"
            http.post(f"/v1/batches/{answer.json().get('id')}/cancel")
    assert [answer.status_code for _, answer in answers] == [200, 429, 200]
    assert error_of(answers[1][1])["message"] == "too many batches of this key are running"
