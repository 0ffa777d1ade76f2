"""Many requests at once do not hold the event loop: few begin in a turn, signs of life at once."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from modulm.config import EngineConfig
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import CheckpointError
from modulm_route_files.slots import Slots
from modulm_route_openai.answers import paced
from modulm_server import json_body
from modulm_server.app import create_app
from modulm_server.auth import _owner
from modulm_server.flags import ServerConfig
from modulm_server.loopback import LoopbackClient, in_background
from modulm_server.pacing import Answers, FairSemaphore, Turns
from modulm_server.request_guard import RequestGuard
from modulm_server.scripted import ScriptedEngine
from modulm_server.serve import make_server, open_socket, serve
from modulm_server.text_work import TextWork


class Clock:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.turn = 0
        self._loop = asyncio.get_running_loop()
        self._tick()

    def _tick(self) -> None:
        self.turn += 1
        self._handle = self._loop.call_soon(self._tick)

    def stop(self) -> None:
        self._handle.cancel()


def test_so_many_begin_in_a_turn_in_their_order() -> None:
    async def all_at_once() -> list[tuple[int, int]]:
        clock, turns, started = Clock(), Turns(per_turn=3), []

        async def one(number: int) -> None:
            await turns.wait()
            started.append((clock.turn, number))

        tasks = [asyncio.create_task(one(number)) for number in range(20)]
        await asyncio.sleep(0)
        tasks[7].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        late = asyncio.create_task(one(20))
        await late
        clock.stop()
        return started

    started = asyncio.run(all_at_once())
    assert [number for _, number in started] == [n for n in range(21) if n != 7]
    turns = [turn for turn, _ in started]
    assert max(map(turns.count, turns)) <= 3
    assert len(set(turns[:19])) <= 8


@pytest.mark.parametrize(("path", "waits"), [("/health", False), ("/tokenize", True)])
def test_signs_of_life_begin_before_those_that_came_first(path: str, waits: bool) -> None:
    async def last_of_many() -> int:
        order: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            order.append(scope["path"])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            pass

        guard = RequestGuard(app, 1 << 20, 0, 100, 1 << 16)
        scopes = [{"type": "http", "path": "/many", "headers": []} for _ in range(100)]
        scopes.append({"type": "http", "path": path, "headers": []})
        await asyncio.gather(*(guard(scope, receive, send) for scope in scopes))
        return order.index(path)

    position = asyncio.run(last_of_many())
    assert position == (100 if waits else 2)


async def order_of(start: Callable[[str], Awaitable[None]], release: Callable[[], None]) -> int:
    """How many of a key with 20 callers pass before the only one of another, who comes last."""
    order: list[str] = []

    async def one(key: str) -> None:
        await start(key)
        order.append(key)
        await asyncio.sleep(0)
        release()

    tasks = [asyncio.create_task(one(key)) for key in ["many"] * 20 + ["one"]]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(order) == 20
    return order.index("one")


def test_a_key_with_many_requests_delays_no_other() -> None:
    async def measure() -> tuple[int, int]:
        threads = FairSemaphore(2)
        return (
            await order_of(Turns(per_turn=2).wait, lambda: None),
            await order_of(threads.acquire, threads.release),
        )

    assert max(asyncio.run(measure())) <= 4


def test_texts_of_a_key_are_tokenized_in_its_turn(tokenizer: Tokenizer) -> None:
    """One key's twenty do not end before another's first."""
    work, order = TextWork(tokenizer, 100, threads=1), []
    begin = threading.Event()

    async def one(key: str) -> None:
        _owner.set(key)
        await work.run(5_000, lambda: (begin.wait(300), order.append(key)))

    async def main() -> None:
        tasks = [asyncio.create_task(one(key)) for key in ["many"] * 20 + ["one"]]
        await asyncio.sleep(0)
        tasks[3].cancel()
        begin.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    work.close()
    assert len(order) == 20
    assert order.index("one") <= 3


def test_a_long_body_delays_no_shorter_one() -> None:
    ended = threading.Event()
    waiting = json_body._thread(1 << 20).submit(ended.wait, 60)
    body = json.dumps({"a": "x" * (1 << 17)}).encode()
    try:
        assert asyncio.run(json_body.read_object(body)) == json.loads(body)
        assert not waiting.done()
    finally:
        ended.set()


def test_threads_that_compute_give_way_to_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.from_keywords(model=str(tmp_path / "none"), port=0)
    monkeypatch.setattr("modulm_server.serve.bound_arenas", lambda environment: None)
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)  # Python's default, whatever an earlier server of this process set
    try:
        with pytest.raises(CheckpointError):
            serve(config, lambda _: pytest.fail("there is no model"), print)
        assert sys.getswitchinterval() < 0.001
    finally:
        sys.setswitchinterval(before)


def test_many_connections_are_taken_in_few_turns(tokenizer: Tokenizer) -> None:
    """libuv takes one connection in a turn, whatever waits: each waited for all before it."""
    config = EngineConfig.from_keywords(model="M", host="127.0.0.1", port=0)
    settings = config.group(ServerConfig)
    engine = ScriptedEngine(tokenizer)
    server, sock = make_server(create_app(engine, config), settings), open_socket(settings)
    turns = 0

    async def measure(counter: int) -> bool:
        """Open connections while the event loop stands still, then count until they are taken."""
        nonlocal turns
        clients = [socket.create_connection(sock.getsockname()) for _ in range(64)]
        while len(server.server_state.connections) < len(clients) and turns < 1000:
            await asyncio.sleep(0)
            turns += 1
        for client in clients:
            client.close()
        return True

    server.on_tick = measure  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_on, args=(sock,))
    thread.start()
    thread.join(300)
    assert 0 < turns < 40


def test_choices_are_shown_in_a_turn_each() -> None:
    """A hundred choices with their log probabilities are a tenth of a second of work."""

    async def shown() -> list[dict[str, int]]:
        clock = Clock()
        items = [each async for each in paced(range(6), lambda index: {"turn": clock.turn})]
        clock.stop()
        return items

    turns = [each["turn"] for each in asyncio.run(shown())]
    assert len(set(turns)) == 6


def test_requests_that_can_wait_start_when_no_answer_is_awaited() -> None:
    async def started() -> list[str]:
        answers, order = Answers(), []
        assert not answers.recent
        first, second = answers.expect(), answers.expect()

        async def line() -> None:
            await answers.wait()
            order.append("line")

        lines = [asyncio.create_task(line()) for _ in range(3)]
        for begun, name in ((first, "first"), (first, "again"), (second, "second")):
            await asyncio.sleep(0)
            order.append(name)
            begun()
        await asyncio.gather(*lines)
        assert answers.recent
        await answers.wait()
        return order

    assert asyncio.run(started()) == ["first", "again", "second", *["line"] * 3]


def test_an_answer_that_takes_long_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modulm_server.pacing._LONGEST", 0.001)

    async def wait() -> None:
        answers = Answers()
        answers.expect()
        await answers.wait()

    asyncio.run(wait())


def test_a_server_that_answers_clients_runs_fewer_lines_of_a_batch() -> None:
    async def most(busy: bool) -> int:
        slots = Slots(lambda: busy)
        tasks = [asyncio.create_task(slots.acquire(100)) for _ in range(50)]
        for _ in range(3):
            await asyncio.sleep(0)
        count = sum(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        return count

    assert asyncio.run(most(busy=True)) == 8
    assert asyncio.run(most(busy=False)) == 32


def test_requests_of_the_server_itself_start_after_those_of_clients() -> None:
    """Those for files and batches too; health checks neither wait nor hold up anything."""

    async def order() -> list[str]:
        loopback, began = LoopbackClient(), []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            began.append(scope["path"] + " in background" * in_background())
            for _ in range(9 * (scope["path"] == "/chat")):
                await asyncio.sleep(0)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            began.append(f"{scope['path']} ended")

        loopback.app = guard = RequestGuard(app, 99, 0.0, 99, 999, answers=loopback.answers)

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None: ...

        async def get(path: str) -> None:
            scope = {"type": "http", "method": "GET", "path": path, "headers": []}
            await guard(scope, receive, send)

        chat = asyncio.create_task(get("/chat"))
        await asyncio.sleep(0)
        await asyncio.gather(loopback.post("/line", b"{}"), get("/v1/files"), get("/health"), chat)
        assert not in_background()
        return began

    began = asyncio.run(order())
    assert began[:4] == ["/chat", "/health", "/health ended", "/chat ended"]
    assert sorted(began[4:]) == [
        "/line ended", "/line in background", "/v1/files", "/v1/files ended",
    ]  # fmt: skip
