"""Log probabilities in the form of OpenAI's chat and responses APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["MIN_LOGPROB", "TokenLogprob", "TopLogprob", "token_logprobs", "token_name"]

#: The log probability reported for a probability of zero, since JSON has no infinity.
MIN_LOGPROB = -9999.0


class TopLogprob(TypedDict):
    """A candidate token. bytes: its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The chosen token, and the top candidates at its position."""

    top_logprobs: list[TopLogprob]


def token_logprobs(
    positions: Sequence[Mapping[int, Any]], token_ids: Sequence[int], top: int, as_ids: bool
) -> list[TokenLogprob]:
    """Build one entry per token, with the `top` best candidates at its position, or those that the
    request names.
    """
    content: list[TokenLogprob] = []
    for token, position in zip(token_ids, positions, strict=True):
        best = [_entry(t, e, as_ids) for t, e in position.items() if e.rank and e.rank <= top]
        named = [_entry(t, e, as_ids) for t, e in position.items() if e.rank is None]
        chosen = _entry(token, position[token], as_ids)
        content.append({**chosen, "top_logprobs": best[:top] + named})
    return content


def token_name(token: int, entry: Any, as_ids: bool) -> str:
    """The text of a token, or `token_id:N` if requested or if the text is unknown."""
    if as_ids or entry.decoded_token is None:
        return f"token_id:{token}"
    text: str = entry.decoded_token
    return text


def _entry(token: int, entry: Any, as_ids: bool) -> TopLogprob:
    text = token_name(token, entry, as_ids)
    return {
        "token": text,
        "logprob": max(entry.logprob, MIN_LOGPROB),
        "bytes": list(text.encode("utf-8", "replace")),
    }
