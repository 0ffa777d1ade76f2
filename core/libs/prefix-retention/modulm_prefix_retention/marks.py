"""What a request asks to hold: marks in its prompt, in `SamplingParams.extra_args`.

The value is plain: `{"key": name, "marks": [[tokens, seconds], ...]}`. Routes write it for fields
of their APIs, and programs may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from modulm.contracts.sampling import SamplingParams
from modulm.errors import RequestError

if TYPE_CHECKING:
    from modulm.contracts.requests import Request

__all__ = ["FIELD", "LONGEST", "Mark", "key_of", "marks_of", "with_marks"]

#: Name of the entry of `extra_args`.
FIELD = "prefix_retention"
#: Maximum seconds: a day, OpenAI's longest.
LONGEST = 86_400
#: Maximum marks of a request, as in Anthropic's API.
_MOST = 4


class Mark(NamedTuple):
    """Hold the prompt's first `tokens` tokens until `seconds` have passed without use."""

    tokens: int
    seconds: float


def with_marks(params: SamplingParams, marks: Sequence[Mark], key: str = "") -> SamplingParams:
    """Return parameters with marks. key: requests with the same key share a memory quota."""
    if not marks:
        return params
    table = {"key": key, "marks": [[mark.tokens, mark.seconds] for mark in marks]}
    return params.with_(extra_args={**(params.extra_args or {}), FIELD: table})


def marks_of(request: Request) -> tuple[Mark, ...]:
    """Return the request's marks, shortest prefix first. Raises RequestError if malformed."""
    table = _table(request)
    listed = table.get("marks", ())
    if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) > _MOST:
        raise RequestError(f"marks must be a list of at most {_MOST}", FIELD)
    return tuple(sorted(_mark(value, request.prompt_len) for value in listed))


def key_of(request: Request) -> str:
    """Return the key that the request's marks count for. Raises RequestError if malformed."""
    key = _table(request).get("key", "")
    if not isinstance(key, str):
        raise RequestError("key must be a string", FIELD)
    return key


def _table(request: Request) -> Mapping[str, Any]:
    params = request.params
    extras = params.extra_args if isinstance(params, SamplingParams) else None
    table = (extras or {}).get(FIELD)
    if table is None:
        return {}
    if not isinstance(table, Mapping):
        raise RequestError(f"{FIELD} must be an object with marks", FIELD)
    if unknown := table.keys() - {"key", "marks"}:
        raise RequestError(f"{FIELD} has no field {min(map(str, unknown))!r}", FIELD)
    return table


def _mark(value: Any, longest: int) -> Mark:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise RequestError("each of marks must be [tokens, seconds]", FIELD)
    tokens, seconds = value
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise RequestError("marks: tokens must be an integer, 0 or more", FIELD)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise RequestError("marks: seconds must be a number", FIELD)
    if not 0 < seconds <= LONGEST:
        raise RequestError(f"marks: seconds must be more than 0, at most {LONGEST}", FIELD)
    return Mark(min(tokens, longest), float(seconds))
