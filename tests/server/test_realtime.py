"""/v1/realtime: sound over a web socket, in OpenAI's events and in vLLM's."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import openai
import pytest
from tests.server.hearing import LEVELS, serve_ears, sound
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from modulm_server.scripted import Reply
from modulm_server.testing import Live

ITEM = "conversation.item.input_audio_transcription"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    flags = {"max_realtime_sessions": 3, "max_realtime_seconds": 20.0}
    with serve_ears(tmp_path_factory.mktemp("whisper"), None, **flags) as server:
        yield server


@pytest.fixture
def socket(live: Live) -> Iterator[ClientConnection]:
    live.engine.said = dict(LEVELS)
    with opened(live) as connection:
        assert take(connection)["type"] == "session.created"
        yield connection


def opened(live: Live, query: str = "", **options: Any) -> ClientConnection:
    return connect(f"{live.url.replace('http', 'ws')}/v1/realtime{query}", **options)


def take(socket: ClientConnection, kind: str | None = None) -> dict[str, Any]:
    """The next event; of a kind: the next one of that, others are left out."""
    while True:
        event: dict[str, Any] = json.loads(socket.recv(timeout=300))
        if kind is None or event["type"] == kind:
            return event
        assert event["type"] not in ("error", f"{ITEM}.failed"), event


def give(socket: ClientConnection, kind: str, **fields: Any) -> None:
    socket.send(json.dumps({"type": kind, **fields}))


def pcm(*parts: tuple[int, float], rate: int = 24000) -> str:
    samples = (sound(*parts, rate=rate) * 32767).astype("<i2")
    return base64.b64encode(samples.tobytes()).decode()


def append(socket: ClientConnection, *parts: tuple[int, float], rate: int = 24000) -> None:
    give(socket, "input_audio_buffer.append", audio=pcm(*parts, rate=rate))


def session(**audio_input: Any) -> dict[str, Any]:
    return {"type": "transcription", "audio": {"input": audio_input}}


def test_openais_events(live: Live, socket: ClientConnection) -> None:
    settings = session(transcription={"model": "M", "language": "en"}, turn_detection=None)
    give(socket, "session.update", session=settings)
    updated = take(socket)
    assert updated["type"] == "session.updated"
    heard = updated["session"]["audio"]["input"]
    assert heard["transcription"] == {"model": "M", "language": "en", "prompt": ""}
    assert heard["format"] == {"type": "audio/pcm", "rate": 24000}
    append(socket, (1, 1.0))
    append(socket, (1, 1.0))
    give(socket, "input_audio_buffer.commit")
    committed = take(socket)
    assert committed["type"] == "input_audio_buffer.committed"
    assert committed["previous_item_id"] is None
    added = take(socket, "conversation.item.added")
    assert added["item"]["id"] == committed["item_id"]
    text, event = "", take(socket)
    while event["type"] == f"{ITEM}.delta":
        assert event["item_id"] == committed["item_id"]
        text, event = text + event["delta"], take(socket)
    assert event["type"] == f"{ITEM}.completed"
    assert event["transcript"] == text == "Ask not what."
    assert event["usage"]["type"] == "tokens"
    assert live.engine.lengths[-1] == pytest.approx(32000, abs=4)
    append(socket, (2, 1.0))
    give(socket, "input_audio_buffer.commit")
    assert take(socket)["previous_item_id"] == committed["item_id"]
    assert take(socket, f"{ITEM}.completed")["transcript"] == "Your country."


def test_vllms_events(live: Live, socket: ClientConnection) -> None:
    give(socket, "session.update", model="M")
    give(socket, "input_audio_buffer.commit")
    append(socket, (2, 1.5), rate=16000)
    give(socket, "input_audio_buffer.commit", final=True)
    text, event = "", take(socket)
    while event["type"] == "transcription.delta":
        text, event = text + event["delta"], take(socket)
    assert event["type"] == "transcription.done"
    assert event["text"] == text == "Your country."
    assert set(event["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert live.engine.lengths[-1] == 24000
    give(socket, "session.update", model="other")
    error = take(socket)
    assert error["type"] == "error"
    assert "other" in error["error"]


def test_turns_are_told_by_loudness(socket: ClientConnection) -> None:
    settings = session(transcription={"language": "en"}, turn_detection={"type": "server_vad"})
    give(socket, "session.update", session=settings)
    assert take(socket)["type"] == "session.updated"
    for parts in [[(0, 4.0)], [(1, 2.0), (0, 0.3)], [(0, 0.4), (3, 1.0), (0, 1.0)]]:
        append(socket, *parts)
    started = take(socket, "input_audio_buffer.speech_started")
    assert started["audio_start_ms"] == 3700
    stopped = take(socket, "input_audio_buffer.speech_stopped")
    assert stopped["audio_end_ms"] == pytest.approx(6500, abs=20)
    assert stopped["item_id"] == started["item_id"] == take(socket)["item_id"]
    second = take(socket, "input_audio_buffer.speech_started")
    assert second["item_id"] != started["item_id"]


def test_the_sdk_speaks_with_it(live: Live) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="k")
    query = {"intent": "transcription"}
    with client, client.realtime.connect(model="M", extra_query=query) as it:
        it.session.update(
            session={
                "type": "transcription",
                "audio": {"input": {"transcription": {"model": "M", "language": "en"}}},
                "include": ["item.input_audio_transcription.logprobs"],
            }
        )
        it.input_audio_buffer.append(audio=pcm((3, 1.0)))
        it.input_audio_buffer.commit()
        for event in it:
            assert event.type not in ("error", f"{ITEM}.failed"), event
            if event.type == f"{ITEM}.delta":
                assert event.logprobs
            if event.type == f"{ITEM}.completed":
                assert event.transcript == "Can do."
                break


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("{", None),
        ("[]", "type"),
        (b"\0\1", None),
        ({"type": "response.create"}, "type"),
        ({"type": "input_audio_buffer.clear", "more": [[]] * 50_000}, "more"),
        ({"type": "input_audio_buffer.clear", **{f"f{i}": 1 for i in range(40)}}, None),
        ({"type": "input_audio_buffer.append"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": "$$"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA" * 400_000}, "audio"),
        ({"type": "input_audio_buffer.commit"}, None),
        ({"type": "session.update", "session": 3}, "session"),
        ({"type": "session.update", "session": {"type": "realtime"}}, "type"),
        ({"type": "session.update", "session": session(format={"type": "audio/x"})}, "audio"),
        (
            {"type": "session.update", "session": session(transcription={"language": "klingon"})},
            "language",
        ),
        (
            {"type": "session.update", "session": session(noise_reduction={"type": "x"})},
            "noise_reduction",
        ),
    ],
)
def test_what_is_wrong_is_told_and_the_session_goes_on(
    socket: ClientConnection, message: Any, param: str | None
) -> None:
    text = message if isinstance(message, str | bytes) else json.dumps(message | {"event_id": "e"})
    socket.send(text)
    error = take(socket)
    assert error["type"] == "error", error
    assert (error["error"]["type"], error["error"]["param"]) == ("invalid_request_error", param)
    known = isinstance(message, dict) and param != "more" and len(message) < 32
    assert error["error"]["event_id"] == ("e" if known else None)
    give(socket, "input_audio_buffer.clear")
    assert take(socket)["type"] == "input_audio_buffer.cleared"


def test_an_answer_that_fails_is_told_for_its_item(live: Live, socket: ClientConnection) -> None:
    live.engine.said[1] = Reply(error_at=1)
    append(socket, (1, 1.0))
    give(socket, "input_audio_buffer.commit")
    item = take(socket)["item_id"]
    failed = take(socket, f"{ITEM}.failed")
    assert (failed["item_id"], failed["error"]["type"]) == (item, "server_error")
    append(socket, (3, 1.0))
    give(socket, "input_audio_buffer.commit")
    assert take(socket, f"{ITEM}.completed")["transcript"] == "Can do."


def test_who_hangs_up_ends_the_request(live: Live) -> None:
    live.engine.said[1] = Reply("word ", delay=0.02, endless=True)
    before = len(live.engine.aborted)
    with opened(live) as socket:
        append(socket, (1, 1.0))
        give(socket, "input_audio_buffer.commit")
        take(socket, f"{ITEM}.delta")
        assert live.engine.active == 1
    live.engine.until_idle()
    assert len(live.engine.aborted) == before + 1


def test_so_many_sessions_and_no_other_models(live: Live) -> None:
    with opened(live, "?model=other") as socket:
        assert "other" in take(socket)["error"]["message"]
        with pytest.raises(ConnectionClosed):
            take(socket)
    with opened(live) as one, opened(live) as two, opened(live) as three, opened(live) as four:
        for socket in (one, two, three):
            assert take(socket)["type"] == "session.created"
        assert take(four)["error"]["code"] == "overloaded"


def test_foreign_pages_and_hosts_open_nothing(live: Live) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        with pytest.raises(InvalidStatus), opened(live, additional_headers=headers):
            pass


def test_a_server_that_stops_closes_its_sockets(tmp_path) -> None:
    with ExitStack() as stack:
        with serve_ears(tmp_path, None) as live:
            socket = stack.enter_context(opened(live))
            assert take(socket)["type"] == "session.created"
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=300)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code in (1001, 1012)


def test_a_key_is_needed_where_there_are_keys(tmp_path) -> None:
    with serve_ears(tmp_path, None, api_key=("secret",), realtime_idle_timeout=1.0) as live:
        with pytest.raises(InvalidStatus), opened(live):
            pass
        key = {"Authorization": "Bearer secret"}
        with opened(live, additional_headers=key) as socket:
            assert take(socket)["type"] == "session.created"
            with pytest.raises(ConnectionClosed):  # nothing is said for a second
                socket.recv(timeout=300)


def test_a_message_that_is_too_long_or_no_text_closes_the_session(live: Live) -> None:
    """Long messages are read in a thread, short ones are not: both end alike."""
    with opened(live) as socket:
        take(socket)
        with suppress(ConnectionClosed):  # before it was sent
            socket.send("x" * ((16 << 20) + 1))
        with pytest.raises(ConnectionClosed):
            take(socket, "nothing")
    for size in (100, 100_000):
        with opened(live) as socket:
            take(socket)
            socket.send(b"\xff" * size, text=True)
            with pytest.raises(ConnectionClosed) as closed:
                take(socket, "nothing")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1007


def test_compression_is_not_offered_and_parts_of_a_message_are_joined(live: Live) -> None:
    with opened(live) as socket:
        assert not socket.protocol.extensions
        take(socket)
        text = json.dumps({"type": "no_event", "event_id": "x" * 100_000})
        for size in (1000, 50_000):
            socket.send(text[start : start + size] for start in range(0, len(text), size))
            socket.ping()
            error = take(socket)
            assert (error["type"], error["error"]["param"]) == ("error", "type")
        assert socket.ping().wait(300)
