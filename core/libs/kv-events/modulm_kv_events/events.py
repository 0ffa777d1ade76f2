"""The two forms of an event: an array, [kind, field, ...], and vLLM's map of named fields.

vLLM has published maps since June 2026 (its pull request 42892), with the kind as `type`, and
arrays before. Source: the classes of vLLM's documented subscriber.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["as_array", "as_map"]

#: Kind -> the names of its fields, in the order of arrays, and how many are always there.
_FIELDS: Mapping[str, tuple[tuple[str, ...], int]] = {
    "BlockStored": (
        (
            "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
            "lora_name", "extra_keys",
        ),
        4,
    ),
    "BlockRemoved": (("block_hashes", "medium"), 1),
    "AllBlocksCleared": ((), 0),
}  # fmt: skip


def as_map(event: Sequence[Any]) -> dict[str, Any]:
    """Return an event of ours with named fields."""
    kind, *fields = event
    names, _ = _FIELDS[kind]
    return {"type": kind, **dict(zip(names, fields, strict=False))}


def as_array(event: Any) -> Any:
    """Return an event as an array, if it is a map. Fields that later versions add are left out.

    Raises ValueError for an unknown kind, and if a field is missing.
    """
    if not isinstance(event, Mapping):
        return event
    names, least = _FIELDS.get(str(event.get("type")), ((), -1))
    if least < 0 or any(name not in event for name in names[:least]):
        raise ValueError(f"an event {event.get('type')!r} with {', '.join(map(str, event))}")
    return [event["type"], *(event.get(name) for name in names)]
