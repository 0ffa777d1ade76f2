"""Approvals of calls of tool servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from modulm_server.hosted_tools import DECLINED
from modulm_server.json_body import bad_field

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["approvals", "declined"]


def approvals(
    responses: Iterable[Mapping[str, Any]], items: Sequence[Mapping[str, Any]]
) -> list[tuple[dict[str, Any], bool]]:
    """Return (item of type mcp_call, whether it was approved) for each approval response.

    items: of the conversation so far, with the requests. Raises ApiError(400).
    """
    requests = {i["id"]: i for i in items if i.get("type") == "mcp_approval_request" and "id" in i}
    calls = []
    for response in responses:
        request = requests.get(response.get("approval_request_id"))
        if request is None or not isinstance(response.get("approve"), bool):
            raise bad_field(
                "input",
                "input: an mcp_approval_response needs approve, and the approval_request_id of a "
                "request in this conversation",
            )
        call = {
            "id": f"mcp_{uuid4().hex}",
            "type": "mcp_call",
            "status": "in_progress",
            "approval_request_id": request["id"],
            "server_label": request["server_label"],
            "name": request["name"],
            "arguments": request["arguments"],
            "output": None,
            "error": None,
        }
        calls.append((call, response["approve"]))
    return calls


def declined(call: dict[str, Any]) -> None:
    """Mark a call that the client did not approve."""
    call |= {"status": "failed", "error": DECLINED}
