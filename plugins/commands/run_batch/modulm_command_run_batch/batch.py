"""Sends the lines of a batch to the server's application in this process."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import httpx
from attrs import evolve, frozen

from modulm_server.app import Served
from modulm_server.engine.client import EngineClient

__all__ = ["EngineGone", "Line", "answer_all", "read_line", "read_lines"]

log = logging.getLogger("modulm.batch")

_BAD, _FAILED = httpx.codes.BAD_REQUEST, httpx.codes.INTERNAL_SERVER_ERROR
#: Seconds between attempts while the engine does not answer.
_AGAIN = 1.0


@frozen
class Line:
    """A request of a batch; `problem`: why it cannot be sent."""

    custom_id: str | None
    url: str = ""
    body: dict[str, Any] | None = None
    problem: str | None = None


class EngineGone(Exception):
    """The engine died; lines without a record are left for another run."""


def read_lines(lines: Sequence[bytes]) -> list[Line]:
    """Parse all lines. A repeated custom_id is a problem of its line."""
    parsed: list[Line] = []
    seen: set[str] = set()
    for raw in lines:
        line = read_line(raw)
        if line.custom_id in seen:
            line = evolve(line, problem=f"custom_id: {str(line.custom_id)[:64]!r} occurs twice")
        elif line.custom_id is not None:
            seen.add(line.custom_id)
        parsed.append(line)
    return parsed


def read_line(raw: bytes) -> Line:
    """Parse a line, recording its problem if it is invalid."""
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return Line(None, problem=f"not valid JSON: {error}")
    if not isinstance(row, dict):
        return Line(None, problem="not a JSON object")
    value = row.get("custom_id")
    custom_id = value if isinstance(value, str) else None
    body = row.get("body")
    if custom_id is None:
        return Line(None, problem="custom_id: a text is required")
    if row.get("method", "POST") != "POST":
        return Line(custom_id, problem=f"method: POST is needed, not {row['method']!r}")
    if not isinstance(row.get("url"), str) or not row["url"].startswith("/v1/"):
        return Line(custom_id, problem="url: a path is needed, such as /v1/chat/completions")
    if not isinstance(body, dict):
        return Line(custom_id, problem="body: a JSON object is required")
    if body.get("stream"):
        return Line(custom_id, problem="body.stream: answers of a batch are not streamed")
    return Line(custom_id, row["url"], body)


async def answer_all(
    served: Served,
    lines: Sequence[tuple[int, Line]],
    *,
    at_once: int,
    key: str | None,
    done: Callable[[int, dict[str, Any]], None],
) -> None:
    """Answer numbered lines, `at_once` at a time; `done` is called with each answer.

    Raises EngineGone, in an exception group, if the engine dies.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    waiting = iter(lines)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=served.app),
        base_url="http://127.0.0.1",
        headers=headers,
        timeout=None,  # noqa: S113  (nothing leaves this process)
    ) as client:

        async def work() -> None:
            for number, line in waiting:
                done(number, await _answer(client, served.generation.engine, line))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(lines))):
                group.create_task(work())


async def _answer(client: httpx.AsyncClient, engine: EngineClient, line: Line) -> dict[str, Any]:
    """Run a line; returns its output line, also for a failure. Raises EngineGone."""
    if line.problem is not None or line.body is None:
        problem = _problem("invalid_request_error", line.problem, "invalid_request")
        return _row(line, int(_BAD), {"error": problem}, problem)
    try:
        answer = await _post(client, engine, line)
    except EngineGone:
        raise
    except Exception as error:
        log.exception("line %s could not be answered", line.custom_id)
        problem = _problem("server_error", f"{type(error).__name__}: {error}", "internal_error")
        return _row(line, int(_FAILED), {"error": problem}, problem)
    try:
        body = answer.json()
    except ValueError:
        body = {"error": {"message": answer.text[:500], "code": answer.status_code}}
    error = body.get("error") if answer.is_error and isinstance(body, dict) else None
    return _row(line, answer.status_code, body, error)


async def _post(client: httpx.AsyncClient, engine: EngineClient, line: Line) -> httpx.Response:
    """POST a line, waiting while the engine is stalled. Raises EngineGone."""
    while True:
        answer = await client.post(line.url, json=line.body)
        if engine.dead is not None:
            raise EngineGone(str(engine.dead))
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            return answer
        await asyncio.sleep(_AGAIN)


def _problem(kind: str, message: str | None, code: str) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": None, "code": code}


def _row(line: Line, status: int, body: Any, error: Any) -> dict[str, Any]:
    number = uuid4().hex
    return {
        "id": f"batch_req_{number}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": f"batch-{number}", "body": body},
        "error": error,
    }
