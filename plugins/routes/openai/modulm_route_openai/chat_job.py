"""A chat request that was read: what its answers, whole or streamed, are made from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm_route_openai.schema import ChatRequest
    from modulm_route_openai.spoken import Voiced
    from modulm_server.chat_turn import ChatTurn
    from modulm_server.hosted_tools import HostedTools
    from modulm_server.hosted_turns import HostedCall

__all__ = ["ChatJob"]


@frozen
class ChatJob:
    """A validated request with its rendered prompt.

    hosted: the tools that the server runs. messages: with those calls; approved: the calls that the
    client approved in this request. voiced: how the answer is spoken, None if it is not.
    """

    id: str
    created: int
    model: str
    body: ChatRequest
    turn: ChatTurn
    role: str
    echo: str
    hosted: HostedTools
    messages: Sequence[dict[str, Any]]
    approved: Sequence[HostedCall]
    voiced: Voiced | None = None

    @property
    def single_call(self) -> bool:
        return self.body.parallel_tool_calls is False
