"""`modulm chat` and `complete` against a real socket: streaming, history, stopping, errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from modulm_cli.client_key import client_key
from modulm_command_chat.backends import Piece, RemoteServer, SamplingOptions, Stats
from modulm_command_chat.chat import Conversation, show
from modulm_command_chat.chat import command as chat
from modulm_command_chat.complete import command as complete


class Server:
    """Answers with what it is told to, and remembers what it was options."""

    def __init__(self) -> None:
        self.deltas: list[dict[str, Any]] = []
        self.options: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.error: tuple[int, Any] | None = None
        self.gone = threading.Event()
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.answer, methods=["POST"]),
                Route("/v1/completions", self.answer, methods=["POST"]),
                Route("/completions", self.other, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return JSONResponse({"data": [{"id": "first"}, {"id": "second"}]})

    async def other(self, request: Request) -> Response:
        """Another API, as llama.cpp has it."""
        return Response('data: {"content": "Hello"}\n\n', media_type="text/event-stream")

    async def answer(self, request: Request) -> Response:
        self.options.append(await request.json())
        if self.error is not None:
            return JSONResponse(self.error[1], status_code=self.error[0])
        return StreamingResponse(self.stream(), media_type="text/event-stream")

    async def stream(self) -> Any:
        try:
            for delta in self.deltas:
                key = "text" if "text" in delta else "delta"
                value = delta.get("text", delta)
                chunk = {"choices": [{key: value}]} if "error" not in delta else delta
                yield f"data: {json.dumps(chunk)}\n\n: a comment\n\n"
                await asyncio.sleep(0)
            while self.deltas and self.deltas[-1].get("content") == "endless":
                yield f"data: {json.dumps({'choices': [{'delta': self.deltas[-1]}]})}\n\n"
                await asyncio.sleep(0.01)
            yield 'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\ndata: [DONE]\n\n'
        finally:
            self.gone.set()


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Server, str]]:
    made = Server()
    server = uvicorn.Server(uvicorn.Config(made.app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    yield made, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    server.should_exit = True
    thread.join(timeout=300)


@pytest.fixture
def server(running: tuple[Server, str]) -> tuple[Server, str]:
    made, url = running
    made.options.clear()
    made.keys.clear()
    made.error = None
    made.gone.clear()
    made.deltas = [{"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}]
    return made, url


def test_one_message(server: tuple[Server, str]) -> None:
    made, url = server
    result = CliRunner().invoke(
        chat,
        ["--url", url, "-q", "hi", "--system-prompt", "be nice", "--api-key", "k", "--stats",
         "--temperature", "0.5", "--max-tokens", "9"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stdout == "Hello\n"
    assert "7 tokens in" in result.stderr
    assert made.keys == ["Bearer k"]
    (options,) = made.options
    assert options["model"] == "first"
    assert options["messages"] == [
        {"role": "system", "content": "be nice"},
        {"role": "user", "content": "hi"},
    ]
    assert (options["temperature"], options["max_tokens"]) == (0.5, 9)
    assert "top_p" not in options


@pytest.mark.parametrize("options", [[], ["--model-name", "first"]])
@pytest.mark.parametrize("command", [chat, complete])
def test_an_address_without_v1_says_what_to_type(
    server: tuple[Server, str], command: Any, options: list[str]
) -> None:
    url = server[1].removesuffix("/v1")
    result = CliRunner().invoke(command, ["--url", url, "-q", "hi", *options])
    assert result.exit_code == 1
    assert f"does not respond like OpenAI's API: try --url {url}/v1" in result.output


def test_a_conversation_keeps_its_messages(
    server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, url = server
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = "one\n\ntwo\n/clear\nthree\n/nonsense\n/system short\nfour\n"
    result = CliRunner().invoke(chat, ["--url", url, "--model-name", "second"], input=lines)
    assert result.exit_code == 0, result.output
    sent = [[message["content"] for message in options["messages"]] for options in made.options]
    assert sent == [["one"], ["one", "Hello", "two"], ["three"], ["short", "four"]]
    assert {options["model"] for options in made.options} == {"second"}
    assert not made.keys


def test_reasoning_and_calls_are_shown_apart(server: tuple[Server, str]) -> None:
    made, url = server
    call = {"function": {"name": "look", "arguments": "{}"}}
    made.deltas = [{"reasoning": "hm"}, {"content": "Well."}, {"tool_calls": [call]}]
    conversation = Conversation(RemoteServer(url, None, "m"), SamplingOptions(), None, stats=False)
    conversation.say("x")
    assert conversation.messages[-1] == {"role": "assistant", "content": "Well."}
    result = CliRunner().invoke(chat, ["--url", url, "-q", "x"])
    assert result.stdout == "hm\nWell.\nlook {}\n"


def test_stopping_an_answer_hangs_up(server: tuple[Server, str]) -> None:
    made, url = server
    made.deltas = [{"content": "endless"}]
    backend = RemoteServer(url, None, "m")

    def interrupted() -> Iterator[Piece]:
        for count, piece in enumerate(
            backend.chat([{"role": "user", "content": "x"}], SamplingOptions())
        ):
            if count == 3:
                raise KeyboardInterrupt
            yield piece

    text, whole = show(interrupted())
    assert not whole
    assert text == "endless" * 3
    backend.close()
    assert made.gone.wait(300)


def test_errors_are_one_line_and_the_conversation_goes_on(
    server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, url = server
    monkeypatch.setenv("HOME", str(tmp_path))
    made.error = (400, {"error": {"message": "too long"}})
    result = CliRunner().invoke(chat, ["--url", url], input="one\n")
    assert result.exit_code == 0
    assert "400: too long" in result.output
    result = CliRunner().invoke(chat, ["--url", url, "-q", "one"])
    assert result.exit_code == 1
    assert "400: too long" in result.output
    result = CliRunner().invoke(chat, ["--url", "http://127.0.0.1:9/v1", "-q", "one"])
    assert result.exit_code == 1
    assert "no answer from http://127.0.0.1:9/v1" in result.output
    result = CliRunner().invoke(chat, ["--model-name", "x", "-q", "one"])
    assert result.exit_code == 2
    assert "--url" in result.output


def test_an_error_inside_a_stream(server: tuple[Server, str]) -> None:
    made, url = server
    made.deltas = [{"content": "Hel"}, {"error": {"message": "out of memory"}}]
    result = CliRunner().invoke(chat, ["--url", url, "-q", "x"])
    assert result.exit_code == 1
    assert result.stdout.startswith("Hel")
    assert "out of memory" in result.stderr


def test_completions_line_by_line(server: tuple[Server, str]) -> None:
    made, url = server
    made.deltas = [{"text": " a"}, {"text": "b"}]
    result = CliRunner().invoke(complete, ["--url", url], input="one\n\ntwo\n")
    assert result.exit_code == 0, result.output
    assert [options["prompt"] for options in made.options] == ["one", "two"]
    assert result.stdout.count(" ab\n") == 2
    assert made.options[0]["max_tokens"] == 128
    result = CliRunner().invoke(complete, ["--url", url, "-q", "x", "--max-tokens", "3"])
    assert result.stdout == " ab\n"
    assert made.options[-1]["max_tokens"] == 3


def test_stats_read_well() -> None:
    assert str(Stats(0.05, 2.0, 10)) == "10 tokens in 2.00 s (5.0 tokens/s), first after 50 ms"
    assert "0.0 tokens/s" in str(Stats(0, 0, 0))


def test_errors_of_any_shape() -> None:
    from modulm_command_chat.client import error_text

    assert error_text({"error": {"message": "m"}}) == "m"
    assert error_text({"error": "m"}) == "m"
    assert error_text({"detail": "m"}) == "{'detail': 'm'}"
    assert error_text("m") == "m"


def test_keys_of_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODULM_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert client_key() == "theirs"
    monkeypatch.setenv("MODULM_API_KEY", "first, second")
    assert client_key() == "first"
