"""Sending every line of a batch through the server's own application, in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import httpx
from attrs import frozen

from modulm_server.app import Served

__all__ = ["Line", "answer_all", "read_line"]

_BAD = httpx.codes.BAD_REQUEST


@frozen
class Line:
    """One request of a batch; `problem` says why it cannot be sent."""

    custom_id: str | None
    url: str = ""
    body: dict[str, Any] | None = None
    problem: str | None = None


def read_line(text: str) -> Line:
    """A line of the file; a wrong one carries its problem."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        return Line(None, problem=f"not valid JSON: {error}")
    if not isinstance(row, dict):
        return Line(None, problem="not a JSON object")
    given = row.get("custom_id")
    custom_id = given if isinstance(given, str) else None
    body = row.get("body")
    if custom_id is None:
        return Line(None, problem="custom_id: a text is needed")
    if row.get("method", "POST") != "POST":
        return Line(custom_id, problem=f"method: POST is needed, not {row['method']!r}")
    if not isinstance(row.get("url"), str) or not row["url"].startswith("/v1/"):
        return Line(custom_id, problem="url: a path is needed, such as /v1/chat/completions")
    if not isinstance(body, dict):
        return Line(custom_id, problem="body: a JSON object is needed")
    if body.get("stream"):
        return Line(custom_id, problem="body.stream: answers of a batch are not streamed")
    return Line(custom_id, row["url"], body)


async def answer_all(
    served: Served,
    lines: Sequence[tuple[int, str]],
    *,
    at_once: int,
    key: str | None,
    done: Callable[[int, dict[str, Any]], None],
) -> None:
    """Answer numbered lines, `at_once` at a time; `done` gets each answer as it comes."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    waiting = iter(lines)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=served.app),
        base_url="http://127.0.0.1",
        headers=headers,
        timeout=None,  # noqa: S113  (nothing leaves this process)
    ) as client:

        async def work() -> None:
            for number, text in waiting:
                done(number, await _answer(client, read_line(text)))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(lines))):
                group.create_task(work())


async def _answer(client: httpx.AsyncClient, line: Line) -> dict[str, Any]:
    """The output line for one input line."""
    if line.problem is not None or line.body is None:
        problem = {"message": line.problem, "type": "invalid_request_error", "code": int(_BAD)}
        return _row(line, int(_BAD), {"error": problem}, problem)
    answer = await client.post(line.url, json=line.body)
    try:
        body = answer.json()
    except ValueError:
        body = {"error": {"message": answer.text[:500], "code": answer.status_code}}
    error = body.get("error") if answer.is_error and isinstance(body, dict) else None
    return _row(line, answer.status_code, body, error)


def _row(line: Line, status: int, body: Any, error: Any) -> dict[str, Any]:
    number = uuid4().hex
    return {
        "id": f"batch_req_{number}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": f"batch-{number}", "body": body},
        "error": error,
    }
