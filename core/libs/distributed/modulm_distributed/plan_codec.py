"""Plans and results as bytes, for executors whose workers are in other processes."""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import numpy as np

from modulm.contracts.connector import BlockTransfer, TransferPlan, TransferResult
from modulm.contracts.executor import Plan, RowStart, StepResult
from modulm.wire.packing import (
    decode,
    encode,
    pack_logprobs,
    pack_media,
    pack_params,
    unpack_logprobs,
    unpack_media,
    unpack_params,
)

__all__ = ["decode_plan", "decode_result", "encode_plan", "encode_result"]


def encode_plan(plan: Plan) -> bytes:
    """Raises TypeError for what is not plain data in a request's parameters."""
    table = _table(plan, Plan)
    if plan.admit:
        table["admit"] = [_pack_start(start) for start in plan.admit]
    if plan.transfers is not None:
        moves = plan.transfers.loads, plan.transfers.saves
        table["transfers"] = [[attrs.astuple(move) for move in part] for part in moves]
    return encode(table)


def decode_plan(data: bytes | bytearray | memoryview) -> Plan:
    table = decode(data)
    for name in ("tables", "release", "state_slots", "drop_media"):
        table[name] = tuple(table.get(name, ()))
    for name in ("encode", "adapters"):
        table[name] = tuple(map(tuple, table.get(name, ())))
    if "transfers" in table:
        loads, saves = (tuple(map(_transfer, part)) for part in table["transfers"])
        table["transfers"] = TransferPlan(loads, saves)
    table["admit"] = tuple(_unpack_start(start) for start in table.get("admit", ()))
    return Plan(**table)


def encode_result(result: StepResult) -> bytes:
    table = _table(result, StepResult)
    for name in ("logprobs", "prompt_logprobs"):
        if name in table:
            table[name] = {row: pack_logprobs(some) for row, some in table[name].items()}
    if result.transfers is not None:
        table["transfers"] = attrs.astuple(result.transfers)
    return encode(table)


def decode_result(data: bytes | bytearray | memoryview) -> StepResult:
    table = decode(data)
    for name in ("logprobs", "prompt_logprobs"):
        if name in table:
            table[name] = {row: unpack_logprobs(some) for row, some in table[name].items()}
    if "transfers" in table:
        done, failed = table["transfers"]
        table["transfers"] = TransferResult(tuple(done), tuple(map(tuple, failed)))
    table["encoded"] = tuple(table.get("encoded", ()))
    return StepResult(**table)


def _table(value: Any, kind: type[attrs.AttrsInstance]) -> dict[str, Any]:
    """The fields that hold something."""
    return {
        name: values
        for name in _names(kind)
        if (values := getattr(value, name)) is not None
        and (type(values) is np.ndarray or values not in ((), {}))
    }


@cache
def _names(kind: type[attrs.AttrsInstance]) -> tuple[str, ...]:
    return tuple(spec.name for spec in attrs.fields(kind))


def _pack_start(start: RowStart) -> dict[str, Any]:
    packed = {"params": pack_params(start.params), "media": pack_media(start.media)}
    return _table(start, RowStart) | packed


def _unpack_start(table: dict[str, Any]) -> RowStart:
    made = {
        "params": unpack_params(table["params"]),
        "stop_ids": tuple(table.get("stop_ids", ())),
        "bad_words": tuple(map(tuple, table.get("bad_words", ()))),
        "media": unpack_media(table["media"]),
    }
    return RowStart(**{**table, **made})


def _transfer(packed: list[Any]) -> BlockTransfer:
    number, request, names, blocks = packed
    return BlockTransfer(number, request, tuple(names), tuple(map(tuple, blocks)))
