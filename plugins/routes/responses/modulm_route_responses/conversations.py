"""Conversations that responses continue: `/v1/conversations` and below.

See https://platform.openai.com/docs/api-reference/conversations. A limited number is stored in
memory, accessible only to their owners.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

from attrs import define, field
from fastapi import Request
from msgspec import Meta, Struct
from starlette.responses import Response

from modulm_route_responses.objects import Card, Deleted
from modulm_route_responses.schema import Metadata, items_of, messages_of
from modulm_route_responses.store import surplus
from modulm_server.auth import owner_of
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field, json_response, read, request_docs
from modulm_server.openapi import response_docs
from modulm_server.paging import Page, page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import APIRouter

__all__ = ["Conversation", "Conversations"]

_MOST = 1_000
#: Maximum items of a conversation, and of a request.
_ITEMS, _AT_ONCE = 10_000, 20

Items = Annotated[list[dict[str, Any]], Meta(max_length=_AT_ONCE)]


class ConversationRequest(Struct, kw_only=True):
    """`POST /v1/conversations`."""

    items: Items | None = None
    metadata: Metadata | None = None


class UpdateRequest(Struct, kw_only=True):
    """`POST /v1/conversations/{conversation_id}`."""

    metadata: Metadata


class ItemsRequest(Struct, kw_only=True):
    """`POST /v1/conversations/{conversation_id}/items`."""

    items: Items


@define(eq=False)
class Conversation:
    """A conversation. items: oldest first."""

    owner: str
    metadata: dict[str, str]
    items: list[dict[str, Any]] = field(factory=list)
    id: str = field(factory=lambda: f"conv_{uuid4().hex}")
    created: int = field(factory=lambda: int(time.time()))

    def card(self) -> Card:
        """OpenAI's conversation object."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created,
            "metadata": self.metadata,
        }

    def add(self, items: Sequence[dict[str, Any]]) -> None:
        """Append items. Beyond the limit, drops the oldest ones."""
        self.items += items
        del self.items[:-_ITEMS]


class Conversations:
    """The newest conversations, and their routes."""

    def __init__(self, max_conversations: int = _MOST) -> None:
        self._max_conversations = max_conversations
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()

    def add_routes(self, router: APIRouter) -> None:
        """Add the routes to a router with the prefix /v1."""
        one = "/conversations/{conversation_id}"
        items, item = f"{one}/items", f"{one}/items/{{item_id}}"
        for path, endpoint, schema, answer in (
            ("/conversations", self.create, ConversationRequest, Card),
            (one, self.update, UpdateRequest, Card),
            (items, self.add_items, ItemsRequest, Page[dict[str, Any]]),
        ):
            router.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                openapi_extra=request_docs(schema),
                responses=response_docs(answer),
            )
        for method, path, plain, card in (
            ("GET", one, self.retrieve, Card),
            ("DELETE", one, self.delete, Deleted),
            ("GET", items, self.list_items, Page[dict[str, Any]]),
            ("GET", item, self.item, dict[str, Any]),
            ("DELETE", item, self.delete_item, Card),
        ):
            router.add_api_route(path, plain, methods=[method], responses=response_docs(card))

    def find(self, reference: Any, owner: str) -> Conversation | None:
        """Find the conversation of a request, by its id or an object with the id.

        Raises ApiError: 400 for any other value, 404 for an unknown one or another owner's.
        """
        if reference is None:
            return None
        name = reference.get("id") if isinstance(reference, dict) else reference
        if not isinstance(name, str):
            raise bad_field("conversation", "conversation must be an id, or an object with one")
        return self._get(name, owner, "conversation")

    async def create(self, request: Request) -> Response:
        """Create a conversation."""
        body = await read(request, ConversationRequest)
        conversation = Conversation(
            owner_of(request), body.metadata or {}, _checked(body.items or [])
        )
        self._conversations[conversation.id] = conversation
        while len(self._conversations) > self._max_conversations:
            del self._conversations[
                surplus({name: stored.owner for name, stored in self._conversations.items()})
            ]
        return json_response(conversation.card())

    async def retrieve(self, request: Request, conversation_id: str) -> Response:
        """Retrieve a conversation."""
        return json_response(self._get(conversation_id, owner_of(request)).card())

    async def update(self, request: Request, conversation_id: str) -> Response:
        """Replace the metadata of a conversation."""
        conversation = self._get(conversation_id, owner_of(request))
        conversation.metadata = (await read(request, UpdateRequest)).metadata
        return json_response(conversation.card())

    async def delete(self, request: Request, conversation_id: str) -> Response:
        """Delete a conversation. Its responses are kept."""
        del self._conversations[self._get(conversation_id, owner_of(request)).id]
        deleted: Deleted = {
            "id": conversation_id,
            "object": "conversation.deleted",
            "deleted": True,
        }
        return json_response(deleted)

    async def add_items(self, request: Request, conversation_id: str) -> Response:
        """Add items to a conversation."""
        conversation = self._get(conversation_id, owner_of(request))
        items = _checked((await read(request, ItemsRequest)).items)
        if not items:
            raise bad_field("items", f"items must have 1 to {_AT_ONCE} items")
        conversation.add(items)
        return json_response(page(items, {"order": "asc"}))

    async def list_items(self, request: Request, conversation_id: str) -> Response:
        """List the items of a conversation, newest first."""
        conversation = self._get(conversation_id, owner_of(request))
        return json_response(page(conversation.items, request.query_params))

    async def item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Retrieve an item of a conversation."""
        return json_response(_item(self._get(conversation_id, owner_of(request)), item_id))

    async def delete_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Delete an item of a conversation."""
        conversation = self._get(conversation_id, owner_of(request))
        conversation.items.remove(_item(conversation, item_id))
        return json_response(conversation.card())

    def _get(self, name: str, owner: str, param: str | None = None) -> Conversation:
        conversation = self._conversations.get(name)
        if conversation is None or conversation.owner != owner:
            raise ApiError(404, f"no conversation {name[:64]!r}", param=param, code="not_found")
        return conversation


def _item(conversation: Conversation, name: str) -> dict[str, Any]:
    for item in conversation.items:
        if item["id"] == name:
            return item
    raise ApiError(404, f"no item {name[:64]!r}", code="not_found")


def _checked(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Validate items and add ids. Raises ApiError(400)."""
    try:
        messages_of(items, needed=False)
    except ApiError as error:
        raise bad_field("items", error.message.replace("input", "items", 1)) from error
    return items_of(items)
