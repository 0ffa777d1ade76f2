"""What crosses between a front end and an engine in another process: msgpack frames, no pickle.

A frame is four bytes of length (big-endian) and a msgpack array whose first item names it. Arrays
travel as raw bytes. Times are of the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import msgspec
import numpy as np

import modulm.errors
from modulm.config import EngineConfig
from modulm.contracts.executor import ModelDescription, RowLogprobs
from modulm.contracts.media import MediaItem
from modulm.contracts.pooling import TextRules
from modulm.contracts.requests import Finish, Request, Start, StepEvents, StepStats
from modulm.contracts.sampling import OutputKind, PoolingParams, SamplingParams, StructuredOutputs
from modulm.engine.types.engine_info import EngineInfo
from modulm.errors import EngineError, ModulmError, RequestError
from modulm.plugins.declaration import Declaration
from modulm.plugins.explain import Decision, Verdict
from modulm.plugins.manager import PluginSet
from modulm.plugins.selection import Selection

__all__ = [
    "LIMIT",
    "pack",
    "pack_config",
    "pack_error",
    "pack_events",
    "pack_info",
    "pack_params",
    "pack_plugins",
    "pack_request",
    "unpack",
    "unpack_config",
    "unpack_description",
    "unpack_error",
    "unpack_events",
    "unpack_info",
    "unpack_params",
    "unpack_plugins",
    "unpack_request",
]

#: Bytes that a frame may have: nobody makes the other side allocate more.
LIMIT = 1 << 30

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def pack(*frame: Any) -> bytes:
    """A frame as bytes, with its length in front. Raises TypeError for what is not plain."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(4, "big") + body


def unpack(body: bytes | bytearray) -> list[Any]:
    """The frame in `body`, which comes without its length."""
    frame: list[Any] = _decoder.decode(body)
    return frame


def _changed(value: Any) -> dict[str, Any]:
    """The fields of an attrs value that differ from their defaults."""
    return {
        spec.name: current
        for spec in attrs.fields(type(value))
        if (current := getattr(value, spec.name)) != spec.default
    }


def pack_params(params: SamplingParams | PoolingParams) -> list[Any]:
    table = _changed(params)
    if isinstance(params, PoolingParams):
        return ["pooling", table]
    if params.structured_outputs is not None:
        table["structured_outputs"] = _changed(params.structured_outputs)
    if "output_kind" in table:
        table["output_kind"] = params.output_kind.value
    return ["sampling", table]


def unpack_params(packed: list[Any]) -> SamplingParams | PoolingParams:
    kind, table = packed
    if kind == "pooling":
        return PoolingParams(**table)
    if "structured_outputs" in table:
        table["structured_outputs"] = StructuredOutputs(**table["structured_outputs"])
    if "output_kind" in table:
        table["output_kind"] = OutputKind(table["output_kind"])
    return SamplingParams(**table)


def pack_request(request: Request) -> dict[str, Any]:
    """Raises RequestError for what cannot leave the process."""
    if request.embeds is not None:
        raise RequestError("prompts of embeddings to an engine in another process: not yet")
    return {
        "id": request.id,
        "prompt": request.prompt.tobytes(),
        "params": pack_params(request.params),
        "eos": request.eos,
        "arrival": request.arrival,
        "priority": request.priority,
        "salt": request.salt,
        "adapter": request.adapter,
        "media": [_pack_media(item) for item in request.media],
        "positions": None if request.positions is None else _pack_array(request.positions),
        "position_offset": request.position_offset,
        "seed": request.seed,
        "bad_words": request.bad_words,
    }


def unpack_request(table: dict[str, Any]) -> Request:
    return Request(**{
        **table,
        "prompt": np.frombuffer(table["prompt"], dtype=np.int64),
        "params": unpack_params(table["params"]),
        "eos": tuple(table["eos"]),
        "media": tuple(_unpack_media(item) for item in table["media"]),
        "positions": None if table["positions"] is None else _unpack_array(table["positions"]),
        "bad_words": tuple(tuple(word) for word in table["bad_words"]),
    })  # fmt: skip


def _pack_media(item: MediaItem) -> list[Any]:
    tensors = {name: _pack_array(array) for name, array in item.tensors.items()}
    return [item.kind, item.hash, item.start, item.length, tensors, item.spans]


def _unpack_media(packed: list[Any]) -> MediaItem:
    kind, digest, start, length, tensors, spans = packed
    arrays = {name: _unpack_array(array) for name, array in tensors.items()}
    return MediaItem(kind, digest, start, length, arrays, tuple(map(tuple, spans)))


def pack_error(error: BaseException | None) -> list[Any] | None:
    """An error by its class's name; one that is not ours becomes an EngineError."""
    if error is None:
        return None
    if isinstance(error, modulm.errors.ConfigError):
        return ["ConfigError", error.field, error.message]
    if isinstance(error, RequestError):
        return [type(error).__name__, error.message, error.param]
    name = type(error).__name__
    if isinstance(error, ModulmError):
        return [name, str(error)]
    return ["EngineError", f"{name}: {error}"]


def unpack_error(packed: list[Any] | None) -> ModulmError | None:
    if packed is None:
        return None
    name, *arguments = packed
    known = name if name in modulm.errors.__all__ else "EngineError"
    error: ModulmError = vars(modulm.errors)[known](*arguments)
    return error


def _pack_array(array: np.ndarray) -> list[Any]:
    return [array.dtype.str, array.shape, np.ascontiguousarray(array).tobytes()]


def _unpack_array(packed: list[Any]) -> np.ndarray:
    dtype, shape, data = packed
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _pack_logprobs(entry: RowLogprobs) -> list[Any]:
    return [_pack_array(entry.ids), _pack_array(entry.values), int(entry.rank)]


def _unpack_logprobs(packed: list[Any]) -> RowLogprobs:
    ids, values, rank = packed
    return RowLogprobs(_unpack_array(ids), _unpack_array(values), rank)


def pack_events(events: StepEvents) -> list[Any]:
    return [
        events.time,
        events.requests,
        events.tokens,
        events.started,
        [[f.request, f.reason, f.stop, pack_error(f.error)] for f in events.finished],
        {
            name: [_pack_logprobs(entry) for entry in entries]
            for name, entries in events.logprobs.items()
        },
        {
            name: [first, [_pack_logprobs(entry) for entry in entries]]
            for name, (first, entries) in events.prompt_logprobs.items()
        },
        {name: _pack_array(values) for name, values in events.pooled.items()},
        events.stats,
    ]


def unpack_events(packed: list[Any]) -> StepEvents:
    time, requests, tokens, started, finished, logprobs, prompts, pooled, stats = packed
    return StepEvents(
        time,
        requests,
        tokens,
        [Start(*start) for start in started],
        [Finish(name, why, stop, unpack_error(error)) for name, why, stop, error in finished],
        {
            name: tuple(_unpack_logprobs(entry) for entry in entries)
            for name, entries in logprobs.items()
        },
        {
            name: (first, tuple(_unpack_logprobs(entry) for entry in entries))
            for name, (first, entries) in prompts.items()
        },
        {name: _unpack_array(values) for name, values in pooled.items()},
        None if stats is None else StepStats(*stats),
    )


def pack_config(config: EngineConfig) -> dict[str, Any]:
    """The flags that differ from their defaults. Raises EngineError for a class among them."""
    flags = config.changed()
    try:
        _encoder.encode(flags)
    except TypeError as error:
        raise EngineError(
            f"a flag holds an object that an engine process cannot be given ({error}); name it "
            "by its path, or use --disable-frontend-multiprocessing"
        ) from error
    return flags


def unpack_config(flags: Mapping[str, Any]) -> EngineConfig:
    return EngineConfig().with_parts(flags)


def pack_info(info: EngineInfo) -> dict[str, Any]:
    return attrs.asdict(info, recurse=False) | {
        "config": pack_config(info.config),
        "description": attrs.asdict(info.description),
        "texts": attrs.asdict(info.texts),
    }


def unpack_info(table: Mapping[str, Any]) -> EngineInfo:
    lists = {name: tuple(table[name]) for name in ("models", "eos", "tasks", "notes")}
    made = {
        "config": unpack_config(table["config"]),
        "description": unpack_description(table["description"]),
        "texts": TextRules(**table["texts"]),
    }
    return EngineInfo(**{**table, **lists, **made})


def unpack_description(table: Mapping[str, Any]) -> ModelDescription:
    """From its fields as plain values."""
    decisions = tuple(
        Decision(**{**found, "candidates": tuple(Verdict(**one) for one in found["candidates"])})
        for found in table["decisions"]
    )
    return ModelDescription(**{**table, "tasks": tuple(table["tasks"]), "decisions": decisions})


def pack_plugins(plugins: PluginSet) -> list[Any]:
    """What `PluginManager.replay` needs."""
    registered = [attrs.asdict(declared, recurse=False) for declared in plugins.registered]
    return [str(plugins.selection), list(plugins.installed), registered, plugins.hook_modules]


def unpack_plugins(packed: list[Any]) -> PluginSet:
    selection, installed, registered, modules = packed
    for table in registered:
        table["api"] = tuple(table["api"]) if isinstance(table["api"], list) else table["api"]
    return PluginSet(
        Selection.parse(selection),
        frozenset(tuple(entry) for entry in installed),
        tuple(Declaration(**table) for table in registered),
        tuple(modules),
    )
