"""Packs what a front end and an engine in another process exchange into plain values of frames.

Times are of the monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from modulm.contracts.engine_info import EngineInfo
from modulm.contracts.pooling import TextRules
from modulm.contracts.requests import Finish, Request, Start, StepEvents, StepStats
from modulm_wire.frames import (
    pack_config,
    pack_error,
    unpack_config,
    unpack_description,
    unpack_error,
)
from modulm_wire.packing import (
    pack_logprobs,
    pack_media,
    pack_params,
    unpack_logprobs,
    unpack_media,
    unpack_params,
)

__all__ = [
    "pack_events",
    "pack_info",
    "pack_request",
    "unpack_events",
    "unpack_info",
    "unpack_request",
]


def pack_request(request: Request) -> dict[str, Any]:
    """Pack a request into plain values."""
    packed = {"params": pack_params(request.params), "media": pack_media(request.media)}
    return attrs.asdict(request, recurse=False) | packed


def unpack_request(table: dict[str, Any]) -> Request:
    return Request(**{
        **table,
        "params": unpack_params(table["params"]),
        "eos": tuple(table["eos"]),
        "media": unpack_media(table["media"]),
        "bad_words": tuple(tuple(word) for word in table["bad_words"]),
    })  # fmt: skip


def pack_events(events: StepEvents) -> list[Any]:
    return [
        events.time,
        events.requests,
        events.tokens,
        events.started,
        [
            [f.request, f.reason, f.stop, pack_error(f.error), f.preemptions]
            for f in events.finished
        ],
        {name: pack_logprobs(entries) for name, entries in events.logprobs.items()},
        {
            name: [first, pack_logprobs(entries)]
            for name, (first, entries) in events.prompt_logprobs.items()
        },
        events.pooled,
        events.stats,
        events.drafted,
        events.transfer_params,
        events.retained,
        events.counts,
        events.arrays,
        events.loaded,
    ]


def unpack_events(packed: list[Any]) -> StepEvents:
    time, requests, tokens, started, finished, logprobs, prompts, pooled, stats, *more = packed
    drafted, transfer_params, retained, counts, arrays, loaded = more
    return StepEvents(
        time,
        requests,
        tokens,
        [Start(*start) for start in started],
        [
            Finish(name, why, stop, unpack_error(error), preemptions)
            for name, why, stop, error, preemptions in finished
        ],
        {name: unpack_logprobs(entries) for name, entries in logprobs.items()},
        {name: (first, unpack_logprobs(entries)) for name, (first, entries) in prompts.items()},
        pooled,
        None if stats is None else _stats(stats),
        {name: (verified, right) for name, (verified, right) in drafted.items()},
        transfer_params,
        retained,
        counts,
        arrays,
        loaded,
    )


def _stats(packed: list[Any]) -> StepStats:
    stats = StepStats(*packed)
    return stats._replace(accepted_at=tuple(stats.accepted_at), routed=tuple(stats.routed))


def pack_info(info: EngineInfo) -> dict[str, Any]:
    return attrs.asdict(info, recurse=False) | {
        "config": pack_config(info.config),
        "description": attrs.asdict(info.description),
        "texts": attrs.asdict(info.texts),
    }


def unpack_info(table: Mapping[str, Any]) -> EngineInfo:
    lists = {name: tuple(table[name]) for name in ("models", "eos", "tasks", "notes")}
    nested = {
        "config": unpack_config(table["config"]),
        "description": unpack_description(table["description"]),
        "texts": TextRules(**table["texts"]),
    }
    return EngineInfo(**{**table, **lists, **nested})
