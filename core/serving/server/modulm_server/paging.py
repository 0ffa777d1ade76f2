"""Lists that clients read page by page, as OpenAI's API gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, TypedDict, TypeVar

from modulm_server.json_body import bad_field

__all__ = ["Page", "page"]

_Item = TypeVar("_Item", bound=Mapping[str, Any])


class Page(TypedDict, Generic[_Item]):
    """A part of a list."""

    object: Literal["list"]
    data: list[_Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(
    items: Sequence[_Item],
    query: Mapping[str, str],
    *,
    usual: int = 20,
    most: int = 100,
) -> Page[_Item]:
    """Some of the items, as `limit`, `order` and `after` want. Raises ApiError(400).

    items: each with an `id`, the oldest first; the newest come first unless `order` is asc.
    usual, most: the limit where none is given, and the largest.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_field("order", "order: asc or desc")
    given = query.get("limit", str(usual))
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= most:
        raise bad_field("limit", f"limit: a number from 1 to {most}")
    listed = items if order == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise bad_field("after", "after: nothing in this list has this id")
        listed = listed[places[0] + 1 :]
    data = list(listed[: int(given)])
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(listed) > len(data),
    }
