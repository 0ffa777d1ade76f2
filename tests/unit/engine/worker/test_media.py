"""Encoder outputs, embeddings and positions on axes, put into the batches of a real runner."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from modulm.config import EngineConfig
from modulm.contracts.executor import Plan, RowStart
from modulm.contracts.media import EMBEDS, MediaItem
from modulm.contracts.model import Batch
from modulm.contracts.sampling import SamplingParams
from modulm.contracts.step_part import BuiltModel
from modulm.errors import EngineError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.media import place_items, seeing
from modulm.testing.runners import open_runner
from modulm_media.step.runner import MediaRunner
from modulm_media.step.values import EncodePlan, MediaRow

PARAMS = SamplingParams(temperature=0.0, logprobs=5)
PROMPT = [5, 9, [70, 71, 72, 73, 74], 11, [80, 81], 12, 13]
WORDS = [5, 9, 70, 71, 72, 73, 74, 11, 80, 81, 12, 13]


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("media") / "tiny")
    plugins = manager.PluginManager()
    model = seeing(plugins.load("models", "LlamaForCausalLM"))
    plugins.register("models", "LlamaForCausalLM", model)
    config = EngineConfig.from_keywords(
        model=str(folder), max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64,
        num_gpu_blocks_override=33, dtype="float32",
    )  # fmt: skip
    return open_runner(config, plugins)


def plan(runner, row, tokens, start, count, **more) -> Plan:
    table = (1 + 4 * row + np.arange(4, dtype=np.int32))[None]
    return Plan(
        step=0,
        rows=np.array([row], dtype=np.int32),
        starts=np.array([start], dtype=np.int32),
        counts=np.array([count], dtype=np.int32),
        tokens=np.array(tokens[start : start + count], dtype=np.int64),
        tables=tuple(table for _ in runner.capacity.groups),
        samples=np.array([start + count == len(tokens)]),
        **more,
    )


def first_token(runner, row, tokens, cuts, encode=((0, 1),), media=()) -> tuple[int, np.ndarray]:
    """(token, its best log probabilities) of a prompt that is computed in pieces."""
    admit = RowStart(
        row, f"r{row}", PARAMS, np.array(tokens), np.zeros(0, np.int64), 0, parts=brought(media)
    )
    at = 0
    for step, count in enumerate(cuts):
        named = tuple((row, item) for item in encode[step]) if step < len(encode) else ()
        more = {"admit": (admit,)} if step == 0 else {}
        result = runner.run(plan(runner, row, tokens, at, count, parts=work(named), **more))
        at += count
    runner.run(Plan(0, *(np.zeros(0, np.int32),) * 3, np.zeros(0, np.int64), (), np.zeros(0, bool),
                    release=(row,)))  # fmt: skip
    return int(result.tokens[0]), result.logprobs[row][0].values


def work(items=(), rows=0, drop=()) -> dict[str, EncodePlan]:
    return {"media": EncodePlan(tuple(items), rows, tuple(drop))} if items or rows or drop else {}


def brought(items) -> dict[str, MediaRow]:
    return {"media": MediaRow(tuple(items))} if items else {}


def begins(row, tokens, items) -> RowStart:
    none = np.zeros(0, np.int64)
    return RowStart(row, f"r{row}", PARAMS, np.array(tokens), none, 0, parts=brought(items))


def encoded(result) -> tuple[bytes, ...]:
    return sum((report.value for report in result.parts if report.part == "media"), ())


def prompt_inputs(**model) -> MediaRunner:
    """The runner of a model that is nothing else."""
    made = SimpleNamespace(**{"media": (), "caches": (), **model})
    return MediaRunner(BuiltModel(
        config=SimpleNamespace(scheduler=None, group=lambda kind: kind()),
        loaded=SimpleNamespace(model=made, groups=()),
        platform=SimpleNamespace(device=torch.device("cpu")), plugins=None, mesh=None,
    ))  # fmt: skip


def start(row: int) -> RowStart:
    return RowStart(row, "a", PARAMS, np.zeros(5), np.zeros(0), 0)


def test_the_model_says_what_its_encoder_may_take(runner) -> None:
    assert runner.capacity.parts["media"] == {
        "tokens": 64,
        "cache": 64,
        "rows": 8192,
        "whole": False,
    }


@pytest.mark.parametrize("cuts", [(12,), (4, 8), (2, 3, 4, 3), (1,) * 12])
def test_items_give_what_their_words_give(runner, cuts) -> None:
    expected, values = first_token(runner, 0, WORDS, cuts, encode=())
    tokens, items = place_items(PROMPT)
    found, others = first_token(runner, 1, tokens, cuts, media=items)
    assert found == expected
    np.testing.assert_allclose(others, values, atol=1e-5)


def test_equal_items_are_encoded_once_until_they_are_dropped(runner) -> None:
    encoded = type(runner.model).encoded
    tokens, items = place_items([5, [90, 91], 6, [90, 91]])
    encoded.clear()
    runner.run(Plan(0, *(np.zeros(0, np.int32),) * 3, np.zeros(0, np.int64), (), np.zeros(0, bool),
                    parts=work(drop=tuple({item.hash for item in items}))))  # fmt: skip
    first_token(runner, 0, tokens, (6,), media=items)
    first_token(runner, 1, tokens, (6,), encode=((0,),), media=items)
    assert encoded == [items[0].hash]
    runner.run(Plan(0, *(np.zeros(0, np.int32),) * 3, np.zeros(0, np.int64), (), np.zeros(0, bool),
                    parts=work(drop=(items[0].hash,))))  # fmt: skip
    first_token(runner, 1, tokens, (6,), encode=((0,),), media=items)
    assert encoded == [items[0].hash] * 2


def test_an_item_that_was_not_encoded_is_an_error_and_not_another_answer(runner) -> None:
    tokens, items = place_items([5, [30, 31, 32], 6])
    with pytest.raises(EngineError, match="before it was encoded"):
        first_token(runner, 2, tokens, (5,), encode=(), media=items)


def test_an_encoder_that_gives_too_little_is_named(runner, monkeypatch) -> None:
    monkeypatch.setattr(runner.model, "encode", lambda items: [torch.zeros(1, 8) for _ in items])
    tokens, items = place_items([5, [33, 34, 35], 6])
    with pytest.raises(EngineError, match="1 embeddings for an item of kind 'image'.*3 tokens"):
        first_token(runner, 2, tokens, (5,), encode=((0,),), media=items)


def test_embeddings_stand_for_the_tokens_of_a_prompt(runner) -> None:
    expected, values = first_token(runner, 0, WORDS, (5, 7), encode=())
    with torch.inference_mode():
        embeds = runner.model.embed.lookup(torch.tensor(WORDS)).float().numpy()
    whole = (MediaItem(EMBEDS, b"", 0, len(WORDS), {"embeds": embeds}),)
    found, others = first_token(runner, 1, [0] * len(WORDS), (5, 7), encode=(), media=whole)
    assert found == expected
    np.testing.assert_allclose(others, values, atol=1e-5)


def test_positions_on_several_axes_go_on_alike_after_the_prompt() -> None:
    inputs = prompt_inputs(axes=3)
    own = np.array([[0, 1, 1, 1, 4], [0, 1, 1, 2, 4], [0, 1, 2, 1, 4]])
    inputs.admit(start(1), MediaRow((), own, -1))
    step = Plan(
        0, np.array([0, 1]), np.array([7, 3]), np.array([2, 4]), np.zeros(6, np.int64), (),
        np.ones(2, bool),
    )  # fmt: skip
    found = inputs.axis_positions(step)
    assert found.tolist() == [[7, 8, 1, 4, 4, 5], [7, 8, 2, 4, 4, 5], [7, 8, 1, 4, 4, 5]]
    assert prompt_inputs(axes=1).axis_positions(step) is None


def test_steps_behind_media_are_like_any_others() -> None:
    """So that they are recorded: positions that are alike on all axes are the step's positions."""
    inputs = prompt_inputs(axes=3)
    own = np.array([[0, 1, 1, 1, 4], [0, 1, 1, 2, 4], [0, 1, 2, 1, 4]])
    inputs.admit(start(0), MediaRow((), own, -2))
    steps = ((0, 5), (5, 1))
    found = [inputs.amend_batch(_row_plan(first, count), _batch(count)) for first, count in steps]
    assert found[0].axis_positions.tolist() == own.tolist()
    assert found[0].key() is None
    assert found[1].axis_positions is None
    assert found[1].positions.tolist() == [3]
    assert found[1].key() is not None


def test_encoders_may_give_more_columns_than_the_embedding() -> None:
    wide = MediaItem("image", b"a", 1, 2)
    plain = MediaItem(EMBEDS, b"", 4, 1, {"embeds": np.ones((1, 2), np.float32)})
    inputs = prompt_inputs(axes=1, encode=lambda items: [torch.full((2, 4), 7.0)])
    inputs.admit(start(0), MediaRow((wide, plain)))
    plan = _row_plan(0, 5)
    inputs.begin(plan, EncodePlan(((0, 0),)))
    embeds, mask = inputs.embeds(plan)
    assert embeds.tolist() == [[0] * 4, [7] * 4, [7] * 4, [0] * 4, [1, 1, 0, 0]]
    assert mask.tolist() == [False, True, True, False, True]


def _row_plan(start: int, count: int) -> Plan:
    return Plan(
        0, np.array([0]), np.array([start]), np.array([count]), np.zeros(count, np.int64), (),
        np.ones(1, bool),
    )  # fmt: skip


def _batch(count: int) -> Batch:
    tokens = torch.zeros(count, dtype=torch.int64)
    return Batch(tokens, tokens, tokens[:2], (), (), (), tokens[:1])


def test_spans_of_items_that_lie_in_a_step() -> None:
    inputs = prompt_inputs(axes=1)
    items = (MediaItem("image", b"a", 2, 3, spans=((2, 5),)),
             MediaItem("image", b"b", 8, 4, spans=((8, 10), (10, 12))))  # fmt: skip
    inputs.admit(start(4), MediaRow(items))
    step = Plan(
        0, np.array([1, 4]), np.array([0, 5]), np.array([3, 5]), np.zeros(8, np.int64), (),
        np.ones(2, bool),
    )  # fmt: skip
    assert inputs.spans(step).tolist() == [[1, 8, 10]]
    inputs.release(4)
    assert inputs.spans(step) is None


def _step(
    *,
    drop: tuple[bytes, ...] = (),
    release: tuple[int, ...] = (),
    items: tuple[tuple[int, int], ...] = (),
    rows: int = 0,
) -> Plan:
    """A plan without rows."""
    return Plan(0, *(np.zeros(0, np.int32),) * 3, np.zeros(0, np.int64), (), np.zeros(0, bool),
                release=release, parts=work(items, rows, drop))  # fmt: skip


def test_items_in_pieces_give_what_whole_ones_give(runner) -> None:
    tokens, items = place_items([5, 9, [60, 61, 62, 63, 64], 11])
    wanted, values = first_token(runner, 0, tokens, (8,), encode=((0,),), media=items)
    whole = runner.parts["media"]._outputs[items[0].hash]
    admit = RowStart(
        1, "r1", PARAMS, np.array(tokens), np.zeros(0, np.int64), 0, parts=brought(items)
    )
    first = plan(runner, 1, tokens, 0, 2, admit=(admit,),
                 parts=work(((1, 0),), 2, (items[0].hash,)))  # fmt: skip
    assert encoded(runner.run(first)) == ()
    assert encoded(runner.run(_step(rows=2))) == ()
    assert encoded(runner.run(_step(rows=2))) == (items[0].hash,)
    assert torch.equal(runner.parts["media"]._outputs[items[0].hash], whole)
    result = runner.run(plan(runner, 1, tokens, 2, 6))
    assert (int(result.tokens[0]), encoded(result)) == (wanted, ())
    np.testing.assert_allclose(result.logprobs[1][0].values, values, atol=1e-5)
    runner.run(_step(release=(1,)))


def test_what_was_begun_is_done_at_once_or_dropped(runner) -> None:
    tokens, items = place_items([5, [50, 51, 52], [53, 54, 55], 11])
    admit = RowStart(
        2, "r2", PARAMS, np.array(tokens), np.zeros(0, np.int64), 0, parts=brought(items)
    )
    both = ((2, 0), (2, 1))
    runner.run(plan(runner, 2, tokens, 0, 1, admit=(admit,), parts=work(both, 1)))
    assert list(runner.parts["media"].begun) == [item.hash for item in items]
    runner.run(_step(drop=(items[0].hash,)))
    assert not runner.parts["media"].begun, (
        "a step that encodes whole items finishes what was begun"
    )
    assert items[0].hash not in runner.parts["media"]._outputs
    runner.run(_step(items=((2, 0),)))
    assert len(runner.run(plan(runner, 2, tokens, 1, 7)).tokens) == 1
    runner.run(_step(release=(2,)))


def test_a_piece_that_fails_fails_the_step_that_needs_the_item(runner, monkeypatch) -> None:
    def broken(items):
        yield 1
        raise ValueError("a broken picture")

    monkeypatch.setattr(runner.model, "encode_in_pieces", broken)
    tokens, items = place_items([5, [40, 41, 42], 11])
    admit = RowStart(
        3, "r3", PARAMS, np.array(tokens), np.zeros(0, np.int64), 0, parts=brought(items)
    )
    runner.run(plan(runner, 3, tokens, 0, 1, admit=(admit,), parts=work(((3, 0),), 1)))
    assert encoded(runner.run(_step(rows=1))) == (items[0].hash,)
    with pytest.raises(ValueError, match="a broken picture"):
        runner.run(plan(runner, 3, tokens, 1, 4))
    monkeypatch.undo()
    again = plan(runner, 3, tokens, 1, 4, parts=work(((3, 0),), drop=(items[0].hash,)))
    assert len(runner.run(again).tokens) == 1
    runner.run(_step(release=(3,)))
