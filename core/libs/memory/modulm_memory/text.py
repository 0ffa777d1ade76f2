"""Estimates of memory as text and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modulm_memory.sizes import size

if TYPE_CHECKING:
    from modulm_memory.advice import Change
    from modulm_memory.estimate import CacheUse, Estimate, RankEstimate

__all__ = ["as_data", "render"]

_LENGTHS = 3


def render(found: Estimate, changes: Sequence[Change] = (), name: str = "") -> str:
    """Format an estimate: what the tightest rank holds, what fits, and what to change.

    name: of the model, if it was not read from `--model`.
    """
    rank = found.tightest
    rows: list[tuple[str, str, str]] = [
        ("weights", size(rank.weights.bytes), f"{found.dtype}, quantization {found.quantization}")
    ]
    rows += [(f"  {part}", size(held), "") for part, held in sorted(rank.weights.held.items())]
    if rank.weights.host:
        rows.append(("weights in host memory", size(rank.weights.host), "beside the device"))
    constants = rank.tables + rank.buffers
    rows += [("tables of positions, constants", size(constants), "")] if constants else []
    rows += [("adapters", size(rank.adapters), "all at the largest rank")] if rank.adapters else []
    for use in rank.caches:
        per, scope = _growth(use)
        rows.append((_title(use), per, f"{scope}; {use.layers} layers, {use.dtype}"))
    rows.append(("activations of a step", size(rank.step), "the largest step"))
    device = f"{size(rank.memory.free)} free of {size(rank.memory.total)}"
    rows.append(("memory of the device", device, found.platform))
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    ranks = f", each of {len(found.ranks)} ranks" if len(found.ranks) > 1 else ""
    lines = [f"{name or found.config.model.model} ({found.architecture}{ranks})"]
    lines += [f"  {a:{first}}  {b:>{second}}  {c}".rstrip() for a, b, c in rows]
    lines += [*_verdict(found), *(f"note: {note}" for note in _notes(found))]
    lines += [f"{change.reason}:\n  {change.command}" for change in changes]
    return "\n".join(lines)


def as_data(found: Estimate, changes: Sequence[Change] = (), name: str = "") -> dict[str, Any]:
    """Convert an estimate to JSON values; sizes are in bytes."""
    return {
        "model": name or found.config.model.model,
        "architecture": found.architecture,
        "platform": found.platform,
        "dtype": found.dtype,
        "kv_cache_dtype": found.kv_dtype,
        "quantization": found.quantization,
        "fits": found.fits,
        "problem": found.problem or None,
        "max_model_len": {"requested": found.length, "fits": found.context},
        "requests": {str(length): found.sequences(length) for length in _lengths(found)},
        "ranks": [_rank(rank) for rank in found.ranks],
        "notes": _notes(found),
        "changes": [{"reason": each.reason, "command": each.command} for each in changes],
    }


def _rank(rank: RankEstimate) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "weights": {"total": rank.weights.bytes, **rank.weights.held},
        "host_weights": rank.weights.host,
        "stored": rank.stored,
        "constants": rank.tables + rank.buffers,
        "adapters": rank.adapters,
        "caches": [
            {
                "kind": use.kind,
                "layers": use.layers,
                "dtype": use.dtype,
                "bytes_per_1k_tokens": round(use.per_1k),
                "bytes_per_sequence": use.block if use.kind == "state" else None,
                "window": use.window,
            }
            for use in rank.caches
        ],
        "step": rank.step,
        "loading": rank.loading,
        "memory": {"total": rank.memory.total, "free": rank.memory.free},
        "cache_budget": rank.budget,
    }


def _title(use: CacheUse) -> str:
    return "recurrent states" if use.kind == "state" else f"KV cache, {use.kind}"


def _growth(use: CacheUse) -> tuple[str, str]:
    """Return the bytes of a cache, and of what."""
    if use.kind == "state":
        return size(use.block), "per request"
    scope = "per 1k tokens" if use.window is None else f"per 1k tokens, at most {use.window}"
    return size(use.per_1k), scope


def _lengths(found: Estimate) -> list[int]:
    """Return lengths to show: the longest, and shorter ones."""
    lengths = [found.context // 4**step for step in range(_LENGTHS)]
    return [length for length in lengths if length > 0]


def _verdict(found: Estimate) -> list[str]:
    if found.problem:
        return [f"does not fit: {found.problem}"]
    if found.fits:
        first = f"fits, with the whole context of {found.length} tokens"
    else:
        first = f"fits with a context of {found.context} tokens instead of {found.length}"
    requests = ", ".join(
        f"{found.sequences(length)} of {length} tokens" for length in _lengths(found)
    )
    return [first, f"requests at once: {requests}"]


def _notes(found: Estimate) -> list[str]:
    notes = [note for rank in found.ranks for note in rank.weights.notes]
    notes += [note for rank in found.ranks if rank.sizing for note in rank.sizing.notes]
    return [*dict.fromkeys(notes)]
