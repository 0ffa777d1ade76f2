"""The served models, in OpenAI's form and in Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from fastapi import Request
from starlette.responses import Response

from modulm_plugin_lock import lock_digest
from modulm_server.auth import owner_of, usable_adapters
from modulm_server.errors import ApiError, error_body, model_error
from modulm_server.json_body import bad_field, json_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm_route_openai.objects import ModelCard, ModelInfo, ModelList, ModelPage, ModelState
    from modulm_server.directory import ModelStatus
    from modulm_server.route import RouteContext

__all__ = ["Models"]

_PAGE = 1000


class Models:
    """`/v1/models`. Both APIs use this path: clients that send `anthropic-version` get Anthropic's
    form (https://docs.anthropic.com/en/api/models-list).
    """

    def __init__(self, context: RouteContext) -> None:
        self._context = context

    async def listed(self, request: Request) -> Response:
        """List the served models."""
        served = self._served(request)
        names = tuple(served)
        if not _is_anthropic(request):
            data = [self._card(name, status) for name, status in served.items()]
            cards: ModelList = {"object": "list", "data": data}
            return json_response(cards)
        try:
            page_names, more = _page(names, request.query_params)
        except ApiError as error:
            return _anthropic_error(error)
        page: ModelPage = {
            "data": [self._info(name, served[name]) for name in page_names],
            "first_id": page_names[0] if page_names else None,
            "last_id": page_names[-1] if page_names else None,
            "has_more": more,
        }
        return json_response(page)

    async def one(self, request: Request, model: str) -> Response:
        """Describe a model."""
        served = self._served(request)
        known = model in served
        if not _is_anthropic(request):
            if not known:
                raise model_error(model)
            return json_response(self._card(model, served[model]))
        if not known:
            return _anthropic_error(model_error(model))
        return json_response(self._info(model, served[model]))

    def _served(self, request: Request) -> dict[str, ModelStatus | None]:
        """The names of models and of adapters; with the model's status on a server of several."""
        directory = self._context.directory
        if directory is None:
            return dict.fromkeys((*self._context.models, *usable_adapters(self._context.engine)))
        statuses = directory.statuses(owner_of(request))
        return {name: one for one in statuses for name in (*one.names, *one.adapters)}

    def _card(self, name: str, status: ModelStatus | None) -> ModelCard:
        """OpenAI's model object. For adapters: parent is the base model, root the source."""
        card = self._single_card(name) if status is None else self._card_of_several(name, status)
        if (lock := lock_digest(self._context.config)) is not None:
            card["plugins_lock"] = lock
        return card

    def _single_card(self, name: str) -> ModelCard:
        adapter = self._context.engine.adapters.get(name)
        root, parent = self._context.models[0], None
        if adapter is not None:
            parent = adapter.parent or root
            root = adapter.root or adapter.path
        return {
            "id": name,
            "object": "model",
            "created": self._context.created,
            "owned_by": "modulm",
            "root": root,
            "parent": parent,
            "max_model_len": self._context.engine.info.max_model_len,
        }

    def _card_of_several(self, name: str, status: ModelStatus) -> ModelCard:
        directory, info = self._context.directory, status.info
        state: ModelState = {
            "value": status.state,
            "error": status.error,
            "memory": status.memory,
            "memory_budget": None if directory is None else directory.budget,
            "last_used": status.last_used,
            "expires_at": status.expires_at,
            "pinned": status.pinned,
            "active_requests": status.active,
            "waiting_requests": status.waiting,
        }
        return {
            "id": name,
            "object": "model",
            "created": self._context.created,
            "owned_by": "modulm",
            "root": status.adapters.get(name, status.name),
            "parent": status.name if name in status.adapters else None,
            "max_model_len": None if info is None else info.max_model_len,
            "status": state,
            "tasks": [] if info is None else list(info.tasks),
        }

    def _info(self, name: str, status: ModelStatus | None) -> ModelInfo:
        created = datetime.fromtimestamp(self._context.created, UTC)
        info = self._context.engine.info
        if status is not None and status.info is not None:
            info = status.info
        longest = info.max_model_len
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": longest,
            "max_tokens": longest,
        }


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _anthropic_error(error: ApiError) -> Response:
    return json_response({"type": "error", **error_body(error)}, error.status, error.headers)


def _page(names: tuple[str, ...], query: Mapping[str, str]) -> tuple[tuple[str, ...], bool]:
    """Select a page of names; returns (names, whether there are more). Raises ApiError(400)."""
    limit_text = query.get("limit", "20")
    if (
        not limit_text.isascii()
        or not limit_text.isdigit()
        or not 1 <= int(limit_text[:9]) <= _PAGE
    ):
        raise bad_field("limit", f"limit must be a number from 1 to {_PAGE}")
    limit = int(limit_text)
    for cursor in ("after_id", "before_id"):
        if cursor in query and query[cursor] not in names:
            raise bad_field(cursor, f"{cursor}: no model has this id")
    if "before_id" in query:
        before = names[: names.index(query["before_id"])]
        return before[-limit:], len(before) > limit
    after = names[names.index(query["after_id"]) + 1 :] if "after_id" in query else names
    return after[:limit], len(after) > limit
