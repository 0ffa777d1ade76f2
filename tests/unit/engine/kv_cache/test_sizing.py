"""How cache memory is shared out among groups."""

from __future__ import annotations

import pytest
from attrs import evolve

from modulm.config import EngineConfig
from modulm.contracts.attention import AttentionSpec
from modulm.contracts.model import CacheKind, StateSpec
from modulm.contracts.platform import Memory
from modulm.engine.kv_cache.sizing import cache_budget, share_out
from modulm.errors import ConfigError
from modulm.loading import CacheGroup

SPEC = AttentionSpec(4, 2, 16, 0.25, "float32", "float32")
FULL = CacheGroup(
    kind=CacheKind.ATTENTION,
    layers=(0,),
    spec=SPEC,
    backend=None,
    block_size=16,
    window=None,
    block_bytes=1000,
)
WINDOW = evolve(FULL, layers=(1,), spec=evolve(SPEC, window=64), window=64, block_bytes=3000)
STATE = CacheGroup(
    kind=CacheKind.STATE,
    layers=(2,),
    spec=StateSpec((("s", (4,), "float32"),)),
    backend=None,
    block_size=1024,
    window=None,
    block_bytes=50,
)
ASKS = {"max_model_len": 1024, "chunk": 32, "rows": 8}


def test_groups_hold_as_many_full_sequences_each() -> None:
    # A sequence needs 64 blocks of the first group and (64 + 2 * 32) / 16 + 2 = 10 of the second.
    one = 64 * 1000 + 10 * 3000
    sizing = share_out([FULL, WINDOW], 5 * one + 4000, **ASKS)
    assert sizing.blocks == (5 * 64 + 1, 5 * 10 + 1)
    assert (sizing.max_model_len, sizing.notes) == (1024, ())
    assert sum(b * g.block_bytes for b, g in zip(sizing.blocks, (FULL, WINDOW), strict=True)) <= (
        5 * one + 4000
    )


def test_no_more_than_all_rows_can_use() -> None:
    assert share_out([FULL], 10**9, **ASKS).blocks == (8 * 64 + 1,)


def test_states_take_one_slot_per_row_and_the_null_slot() -> None:
    sizing = share_out([FULL, STATE], 9 * 50 + 1000 + 2 * 64_000, **ASKS)
    assert sizing.blocks == (2 * 64 + 1, 9)
    assert share_out([STATE], 10**6, **ASKS).blocks == (9,)


def test_states_that_are_too_large_for_all_rows_leave_half_to_the_others() -> None:
    large = evolve(STATE, block_bytes=50_000)
    sizing = share_out([FULL, large], 500_000, **ASKS)
    assert sizing.blocks[1] == 5
    assert sizing.blocks[0] - 1 == (500_000 - 5 * 50_000 - 1000) // 1000
    assert any("4 sequences" in note for note in sizing.notes)
    assert share_out([FULL, large], 170_000, **ASKS).blocks[1] == 2


def test_states_that_are_kept_take_more_slots() -> None:
    sizing = share_out([FULL, evolve(STATE, block_size=64)], 10**9, **ASKS)
    assert (sizing.blocks, sizing.notes) == ((8 * 64 + 1, 4 * 8 + 1), ())


def test_a_small_budget_shortens_the_sequences_and_says_so() -> None:
    sizing = share_out([FULL], 11_500, **ASKS)
    assert sizing.blocks == (11,)
    assert sizing.max_model_len == 160
    assert "160 instead of 1024" in sizing.notes[0]


@pytest.mark.parametrize("budget", [0, -5])
def test_what_cannot_be_done_is_an_error_with_figures(budget) -> None:
    with pytest.raises(ConfigError, match="MiB") as caught:
        share_out([FULL], budget, **ASKS)
    assert caught.value.field == "max_model_len"


def test_an_override_is_taken_as_it_is() -> None:
    sizing = share_out([FULL, STATE], 0, override=65, **ASKS)
    assert sizing.blocks == (65, 9)
    assert share_out([FULL, STATE], 0, override=65, drafts=3, **ASKS).blocks == (65, 33)
    assert sizing.max_model_len == 1024
    short = share_out([FULL], 0, override=5, **ASKS)
    assert short.max_model_len == 64
    assert short.notes


@pytest.mark.parametrize(
    ("total", "free", "expected"),
    [
        (1000, 900, (500 - 100) * 0.9),  # half of the device, less what is taken already
        (1000, 200, 100 * 0.9),  # others have most: half of what they left
        (1000, 1000, 500 * 0.9),
    ],
)
def test_budget(total, free, expected) -> None:
    def never() -> int:
        raise AssertionError("measured although the budget is given")

    config = EngineConfig.from_keywords(gpu_memory_utilization=0.5)
    assert cache_budget(config, Memory(total, free), lambda: 30) == round(expected / 0.9) - 30
    assert cache_budget(config, Memory(total, free), lambda: None) == int(expected)
    fixed = EngineConfig.from_keywords(kv_cache_memory_bytes=77)
    assert cache_budget(fixed, Memory(total, free), never) == 77
