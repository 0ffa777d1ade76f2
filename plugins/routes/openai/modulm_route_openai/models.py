"""The served models, in OpenAI's form and in Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from fastapi import Request
from starlette.responses import Response

from modulm_server.errors import ApiError, error_body, model_error
from modulm_server.json_body import bad_field, json_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm_route_openai.objects import ModelCard, ModelInfo, ModelList, ModelPage
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
        names = self._names
        if not _is_anthropic(request):
            cards: ModelList = {"object": "list", "data": [self._card(name) for name in names]}
            return json_response(cards)
        try:
            page_names, more = _page(names, request.query_params)
        except ApiError as error:
            return _anthropic_error(error)
        page: ModelPage = {
            "data": [self._info(name) for name in page_names],
            "first_id": page_names[0] if page_names else None,
            "last_id": page_names[-1] if page_names else None,
            "has_more": more,
        }
        return json_response(page)

    async def one(self, request: Request, model: str) -> Response:
        """Describe a model."""
        known = model in self._names
        if not _is_anthropic(request):
            if not known:
                raise model_error(model)
            return json_response(self._card(model))
        return json_response(self._info(model)) if known else _anthropic_error(model_error(model))

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of the model and of the adapters."""
        return (*self._context.models, *self._context.engine.adapters)

    def _card(self, name: str) -> ModelCard:
        """OpenAI's model object. For adapters: parent is the base model, root the source."""
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

    def _info(self, name: str) -> ModelInfo:
        created = datetime.fromtimestamp(self._context.created, UTC)
        longest = self._context.engine.info.max_model_len
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
