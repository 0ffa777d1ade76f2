"""Pages of lists, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypedDict, TypeVar

from modulm_server.json_body import bad_field

__all__ = ["Page", "page"]

_Item = TypeVar("_Item", bound=Mapping[str, Any])


class Page(TypedDict, Generic[_Item]):
    """One page of a list."""

    object: Literal["list"]
    data: list[_Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(
    items: Sequence[_Item],
    query: Mapping[str, str],
    *,
    default_limit: int = 20,
    max_limit: int = 100,
) -> Page[_Item]:
    """Select a page of items by `limit`, `order` and `after`. Raises ApiError(400).

    items: each with an `id`, oldest first. The page starts with the newest unless `order` is asc.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_field("order", "order must be asc or desc")
    limit = query.get("limit", str(default_limit))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:9]) <= max_limit:
        raise bad_field("limit", f"limit must be a number from 1 to {max_limit}")
    listed = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        matches = [index for index, item in enumerate(listed) if item["id"] == after]
        if not matches:
            raise bad_field("after", "after: no item of this list has this id")
        listed = listed[matches[0] + 1 :]
    data = list(listed[: int(limit)])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(listed) > len(data),
    }
