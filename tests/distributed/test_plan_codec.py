"""Plans and results through bytes, with every field filled."""

from __future__ import annotations

from collections import Counter

import attrs
import numpy as np
import pytest

from modulm import SamplingParams
from modulm.contracts.connector import BlockTransfer, TransferPlan, TransferResult
from modulm.contracts.executor import (
    PartReport,
    Plan,
    RowFailure,
    RowLogprobs,
    RowStart,
    StepResult,
)
from modulm.contracts.media import MediaItem
from modulm.contracts.sampling import OutputKind, PoolingParams, StructuredOutputs
from modulm.testing.connectors import FakeConnector
from modulm.testing.engines import step_parts
from modulm_adapters.step.values import AdapterRow
from modulm_distributed.plan_codec import PlanCodec
from modulm_media.step.values import EncodePlan, MediaRow

I32, I64 = np.int32, np.int64
CODEC = PlanCodec(step_parts(FakeConnector()))


def same(one: object, other: object) -> bool:
    """Equal in type, shape and value, at every depth."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if attrs.has(type(one)):
        return all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in attrs.fields(type(one))
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def full_plan() -> Plan:
    params = SamplingParams(
        temperature=0.5, logit_bias={3: -1.5}, bad_words=("no",), stop=("a", "b"),
        structured_outputs=StructuredOutputs(json={"type": "object"}), extra_args={"x": [1]},
        output_kind=OutputKind.DELTA, speculative=3,
    )  # fmt: skip
    pixels = {"pixels": np.arange(12, dtype=np.float32).reshape(3, 4)}
    media = MediaItem("image", b"\x00\x01", 2, 3, pixels, ((2, 5),))
    parts = {
        "adapters": AdapterRow("ada", 2),
        "media": MediaRow((media,), np.arange(15).reshape(3, 5), -2),
    }
    start = RowStart(
        3, "r", params, np.arange(5), np.arange(2), 2**63 + 5, (1, 2), ((3, 4), (5,)), "salt",
        np.arange(3), parts,
    )  # fmt: skip
    pooled = RowStart(4, "p", PoolingParams(task="embed"), np.arange(3), np.zeros(0, I64))
    move = BlockTransfer(7, "r", (b"n1", b"n2"), ((1, 2), (3,)))
    return Plan(
        9, np.array([3, 4], I32), np.array([0, 1], I32), np.array([2, 3], I32), np.arange(5),
        (np.ones((2, 3), I32), np.ones((2, 1), I32)), np.array([True, False]), (start, pooled),
        (0, 2), np.array([1, 0], I32), (None, np.ones((2, 1), I32)),
        {
            "media": EncodePlan(((3, 0),), 5, (b"\xff",)),
            "adapters": ((1, "ada"),),
            "transfers": TransferPlan((move,), (move, move)),
        },
    )  # fmt: skip


def full_result() -> StepResult:
    entry = RowLogprobs(np.arange(3), np.arange(3, dtype=np.float32), 2)
    return StepResult(
        9, np.arange(3), np.array([2, 1], I32), {3: (entry, entry)}, {4: (entry,)},
        {5: RowFailure("broken", "structured_outputs"), 6: RowFailure("lost")}, (7,),
        (
            PartReport("pooling", {4: np.ones((2, 2), np.float32)}),
            PartReport("drafts", {3: np.arange(2)}, 1),
            PartReport("transfers", TransferResult((1,), ((2, "gone"),)), 2),
            PartReport("media", (b"\xff",)),
        ),
        0.25, np.array([4, 0, 1]),
    )  # fmt: skip


def test_every_field_is_filled() -> None:
    for value in (full_plan(), full_result(), full_plan().admit[0]):
        for field in attrs.fields(type(value)):
            given = getattr(value, field.name)
            assert given is not None, field.name
            assert isinstance(given, np.ndarray) or given not in ((), {}), field.name


def test_plans_and_results_come_back_as_they_were() -> None:
    plan, result = full_plan(), full_result()
    assert same(plan, CODEC.decode_plan(CODEC.encode_plan(plan)))
    assert same(result, CODEC.decode_result(CODEC.encode_result(result)))
    empty = Plan(0, *(np.zeros(0, I32) for _ in range(3)), np.zeros(0, I64), (), np.zeros(0, bool))
    assert same(empty, CODEC.decode_plan(CODEC.encode_plan(empty)))
    assert CODEC.decode_plan(CODEC.encode_plan(plan)).tokens.flags.writeable


def test_damaged_plans_and_results_are_errors_and_nothing_else(rng, rounds) -> None:
    """Ranks are trusted; what a fault of memory or a cable changes is an error all the same."""
    plan, result = CODEC.encode_plan(full_plan()), CODEC.encode_result(full_result())
    seen: Counter[str] = Counter()
    for _ in range(300 * rounds):
        decode, data = rng.choice([(CODEC.decode_plan, plan), (CODEC.decode_result, result)])
        content = bytearray(data)
        at = rng.randrange(len(content))
        content[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        try:
            decode(bytes(content))
            seen["read"] += 1
        except Exception as error:
            seen[type(error).__name__] += 1
    assert not seen.keys() & {"MemoryError", "SystemError", "AssertionError", "RecursionError"}
    assert seen["read"] > 10
    assert len(seen) > 3


def test_of_other_ranks_only_what_planners_want_is_sent() -> None:
    reports = CODEC.decode_reports(CODEC.encode_reports(full_result()))
    assert [(report.part, report.rank) for report in reports] == [("transfers", 2)]
    assert CODEC.encode_reports(StepResult(0, np.zeros(0, I64))) is None


def test_what_is_not_plain_is_refused() -> None:
    params = SamplingParams(extra_args={"x": object()})
    start = RowStart(0, "r", params, np.arange(1), np.zeros(0, I64))
    with pytest.raises(TypeError, match="object is not plain data"):
        CODEC.encode_plan(attrs.evolve(full_plan(), admit=(start,)))
