"""Serializes plans and results for workers in other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from modulm.contracts.executor import PartReport, Plan, RowFailure, RowStart, StepResult
from modulm_wire.packing import (
    decode,
    encode,
    pack_arrays,
    pack_logprobs,
    pack_params,
    unpack_arrays,
    unpack_logprobs,
    unpack_params,
)

if TYPE_CHECKING:
    from modulm.contracts.step_part import StepPart

__all__ = ["PlanCodec"]


class PlanCodec:
    """Packs the core's fields, and values of step parts with the parts' methods."""

    def __init__(self, parts: Iterable[StepPart]) -> None:
        self._parts = {part.name: part for part in parts}
        #: Parts whose planners need reports of all ranks.
        self.of_all_ranks = frozenset(name for name, part in self._parts.items() if part.all_ranks)

    def encode_plan(self, plan: Plan) -> bytes:
        """Encode a plan. Raises TypeError for parameters of a request that are not plain data."""
        arrays = [plan.rows, plan.starts, plan.counts, plan.tokens, plan.samples, *plan.tables]
        table: dict[str, Any] = {}
        if plan.drafted is not None:
            table["drafted"] = plan.drafted
        if plan.state_slots:
            table["state_slots"] = plan.state_slots
        if plan.release:
            table["release"] = plan.release
        if plan.admit:
            table["admit"] = [self._pack_start(start) for start in plan.admit]
        if plan.parts:
            table["parts"] = self.pack_parts(plan.parts)
        return _join((plan.step, table), arrays)

    def decode_plan(self, data: bytes | bytearray | memoryview) -> Plan:
        (step, table), arrays = _split(data)
        rows, starts, counts, tokens, samples, *tables = arrays
        if table:
            for name in ("release", "state_slots"):
                table[name] = tuple(table.get(name, ()))
            table["admit"] = tuple(self._unpack_start(start) for start in table.get("admit", ()))
            if "parts" in table:
                table["parts"] = self._map(table["parts"], lambda part: part.unpack_plan)
        return Plan(step, rows, starts, counts, tokens, tuple(tables), samples, **table)

    def encode_result(self, result: StepResult) -> bytes:
        if not self._has_more(result):
            return _join((result.step, result.seconds, None), [result.tokens])
        table = _table(result, StepResult)
        del table["tokens"]
        for name in ("logprobs", "prompt_logprobs"):
            if name in table:
                table[name] = {row: pack_logprobs(some) for row, some in table[name].items()}
        if result.errors:
            table["errors"] = {
                row: (failure.message, failure.field) for row, failure in result.errors.items()
            }
        if result.parts:
            table["parts"] = [self._pack_report(report) for report in result.parts]
        return _join((result.step, result.seconds, table), [result.tokens])

    def _has_more(self, result: StepResult) -> bool:
        """Whether a result has more than tokens, one of each row."""
        return (
            result.accepted is not None or result.routed is not None or bool(result.parts)
            or bool(result.logprobs or result.prompt_logprobs or result.errors)
            or bool(result.unfinished)
        )  # fmt: skip

    def decode_result(self, data: bytes | bytearray | memoryview) -> StepResult:
        (step, seconds, table), (tokens,) = _split(data)
        if table is None:
            return StepResult(step, tokens, seconds=seconds)
        table["tokens"] = tokens
        for name in ("logprobs", "prompt_logprobs"):
            if name in table:
                table[name] = {row: unpack_logprobs(some) for row, some in table[name].items()}
        if "errors" in table:
            table["errors"] = {row: RowFailure(*packed) for row, packed in table["errors"].items()}
        table["unfinished"] = tuple(table.get("unfinished", ()))
        table["parts"] = tuple(map(self._unpack_report, table.get("parts", ())))
        return StepResult(**table)

    def encode_reports(self, result: StepResult) -> bytes | None:
        """Encode the reports of a rank other than the output rank; None if there are none."""
        reports = [self._pack_report(r) for r in result.parts if r.part in self.of_all_ranks]
        return encode(reports) if reports else None

    def decode_reports(self, data: bytes | bytearray | memoryview) -> tuple[PartReport, ...]:
        return tuple(map(self._unpack_report, decode(data)))

    def pack_parts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Pack values of `Plan.parts`."""
        return self._map(values, lambda part: part.pack_plan)

    def pack_row_parts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Pack values of `RowStart.parts`."""
        return self._map(values, lambda part: part.pack_row)

    def _map(
        self, values: Mapping[str, Any], method: Callable[[StepPart], Callable[[Any], Any]]
    ) -> dict[str, Any]:
        return {name: method(self._parts[name])(value) for name, value in values.items()}

    def _pack_start(self, start: RowStart) -> dict[str, Any]:
        table = _table(start, RowStart) | {"params": pack_params(start.params)}
        if start.parts:
            table["parts"] = self.pack_row_parts(start.parts)
        return table

    def _unpack_start(self, table: dict[str, Any]) -> RowStart:
        unpacked = {
            "params": unpack_params(table["params"]),
            "stop_ids": tuple(table.get("stop_ids", ())),
            "bad_words": tuple(map(tuple, table.get("bad_words", ()))),
            "parts": self._map(table.get("parts", {}), lambda part: part.unpack_row),
        }
        return RowStart(**{**table, **unpacked})

    def _pack_report(self, report: PartReport) -> tuple[str, Any, int]:
        return report.part, self._parts[report.part].pack_report(report.value), report.rank

    def _unpack_report(self, packed: tuple[str, Any, int]) -> PartReport:
        part, value, rank = packed
        return PartReport(part, self._parts[part].unpack_report(value), rank)


def _join(values: tuple[Any, ...], arrays: Sequence[np.ndarray]) -> bytes:
    """Encode plain values and arrays."""
    head = encode(values)
    return len(head).to_bytes(4, "big") + head + pack_arrays(arrays)


def _split(data: bytes | bytearray | memoryview) -> tuple[Any, list[np.ndarray]]:
    """Return the plain values and the arrays of `_join`."""
    end = 4 + int.from_bytes(data[:4], "big")
    return decode(data[4:end]), unpack_arrays(data[end:])


def _table(value: Any, kind: type[attrs.AttrsInstance]) -> dict[str, Any]:
    """Return the fields that are not empty."""
    return {
        name: content
        for name in _names(kind)
        if (content := getattr(value, name)) is not None
        and (type(content) is np.ndarray or content not in ((), {}))
    }


@cache
def _names(kind: type[attrs.AttrsInstance]) -> tuple[str, ...]:
    return tuple(spec.name for spec in attrs.fields(kind))
