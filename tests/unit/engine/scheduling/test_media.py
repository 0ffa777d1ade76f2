"""Media in prompts: encoded before they are needed, once, and within the encoder's budget."""

from __future__ import annotations

import random

import numpy as np
import pytest
from attrs import evolve

from modulm.contracts.executor import Plan
from modulm.contracts.media import DIGEST, EMBEDS, MediaItem
from modulm.contracts.requests import Request
from modulm.contracts.sampling import SamplingParams
from modulm.engine.scheduling.limits import Limits
from modulm.errors import RequestError
from modulm.testing.connectors import FakeConnector
from modulm.testing.engines import check_empty, make_engine
from modulm.testing.fakes import FakeExecutor, Group, encoded_tokens, reference_tokens
from modulm.testing.workloads import Arrival, outcomes, random_workload, run_workload
from modulm_media.step.values import EncodePlan

PLACEHOLDER = 7


def with_media(draw: random.Random, request: Request) -> tuple[Request, Request]:
    """The request with some of its tokens replaced by media, and the text it amounts to."""
    tokens, text, items, at = request.prompt.copy(), request.prompt.copy(), [], 0
    while at < len(tokens):
        at += draw.randint(0, 12)
        length = min(draw.randint(1, 6), len(tokens) - at)
        if length < 1 or draw.random() < 0.3:
            break
        spans = ((at, at + length),) if draw.random() < 0.4 else ()
        item = MediaItem("image", bytes([draw.randint(0, 3), length]), at, length, spans=spans)
        if draw.random() < 0.3:  # embeddings of the caller's, which no encoder makes
            hashes = b"".join(bytes([draw.randint(0, 2)]) * DIGEST for _ in range(length))
            item = MediaItem(EMBEDS, hashes, at, length)
        items.append(item)
        tokens[at : at + length] = PLACEHOLDER if item.encoded else 0
        text[at : at + length] = encoded_tokens(item)
        at += length
    return evolve(request, prompt=tokens, media=tuple(items)), evolve(request, prompt=text)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("connected", [False, True])
def test_media_are_there_when_they_are_needed(
    depth: int, connected: bool, pytestconfig: pytest.Config
) -> None:
    """FakeExecutor fails steps that go over the budget, need what is not there, or cut spans."""
    for seed in range(10 if pytestconfig.getoption("everything") else 3):
        draw = random.Random(f"{seed} {depth} {connected}")
        arrivals, _ = random_workload(draw)
        pairs = [with_media(draw, arrival.request) for arrival in arrivals]
        both = [[Arrival(p[i], a.tick, a.abort) for p, a in zip(pairs, arrivals, strict=True)]
                for i in (0, 1)]  # fmt: skip
        groups = draw.choice([(Group(4, 24),), (Group(4, 100),), (Group(4, 40), Group(4, 34, 9))])
        plain, expected = make_engine(FakeExecutor(groups, max_model_len=70))
        run_workload(plain, both[1], aborts=False)
        limits = Limits(
            rows=draw.randint(1, 5), tokens=draw.randint(12, 80), long=draw.choice([0, 0, 8]),
            reserve=draw.random() < 0.5, prefixes=connected or draw.random() < 0.7,
        )  # fmt: skip
        pieces = {"encoder_rows": draw.choice([0, 1, 4, 30]), "whole_media": draw.random() < 0.3}
        budget = (draw.randint(6, 12), draw.randint(6, 24))
        connector = FakeConnector(lambda i: i % 3, lambda i: i % 4 == 0)
        executor = FakeExecutor(
            groups, max_model_len=70, encoder=budget,
            mover=connector.mover() if connected else None, **pieces,
        )  # fmt: skip
        used = connector if connected else None
        engine, seen = make_engine(executor, limits, None, depth, connector=used)
        aborted = run_workload(engine, both[0])
        wanted, got = outcomes(expected), outcomes(seen)
        for name, outcome in wanted.items():
            if name not in aborted:
                assert got[name] == outcome, (seed, seen.finished[name])
        assert executor.encoded == dict(engine.scheduler.planners["media"].cached)
        check_empty(engine)
        assert not engine.scheduler.planners["media"].rows
        executor.stop()


def ask(engine, name, prompt, *items, tokens=3):
    params = SamplingParams(temperature=0, max_tokens=tokens)
    engine.submit(Request(id=name, prompt=prompt, params=params, media=items))


def item(name: str, start: int, length: int = 4, **fields: object) -> MediaItem:
    return MediaItem("image", name.encode(), start, length, **fields)


def test_a_chunk_ends_before_an_item_that_waits_and_equal_ones_are_encoded_once() -> None:
    executor = FakeExecutor((Group(4, 64),), encoder=(4, 8), keep_plans=True)
    engine, _ = make_engine(executor)
    prompt = [9, 9, *[PLACEHOLDER] * 4, 9, *[PLACEHOLDER] * 8, 9]
    ask(engine, "a", prompt, item("x", 2), item("y", 7), item("x", 11))
    while engine.tick():
        pass
    firsts = [plan for plan in executor.plans if encoded(plan).items]
    assert [encoded(plan).items for plan in firsts] == [((0, 0),), ((0, 1),)]
    assert [(int(p.starts[0]), int(p.counts[0])) for p in firsts] == [(0, 7), (7, 9)]
    ask(engine, "b", [8, *prompt[1:]], item("x", 2), item("z", 7), item("x", 11))
    while engine.tick():
        pass
    assert executor.encodings == 3
    dropped = [hashed for plan in executor.plans for hashed in encoded(plan).drop]
    assert dropped == [b"y"]
    executor.stop()


def test_items_that_a_prefix_hit_covers_are_not_encoded() -> None:
    executor = FakeExecutor((Group(4, 64),), encoder=(8, 8))
    engine, seen = make_engine(executor)
    prompt = [*[PLACEHOLDER] * 4, 9, *[PLACEHOLDER] * 6, 9]
    ask(engine, "a", prompt, item("x", 0), item("y", 5, 4))
    while engine.tick():
        pass
    engine.scheduler.planners["media"].forget(True)  # as if all embeddings were lost
    ask(engine, "b", prompt, item("x", 0), item("y", 5, 4))
    while engine.tick():
        pass
    assert seen.cached["b"] == 8
    assert executor.encodings == 3
    text = np.array(prompt)
    text[:4], text[5:9] = encoded_tokens(item("x", 0)), encoded_tokens(item("y", 5, 4))
    assert seen.tokens["b"] == seen.tokens["a"] == reference_tokens(text.tolist(), 3)
    executor.stop()


@pytest.mark.parametrize(
    ("limits", "encoder", "media", "words"),
    [
        ({}, (0, 0), [item("x", 0)], "does not support media"),
        ({}, (3, 9), [item("x", 0)], "4 tokens, but an encoder step takes at most 3"),
        ({}, (9, 3), [item("x", 0)], "4 tokens, but an encoder step takes at most 3"),
        ({"chunked": False}, (7, 7), [item("x", 0), item("y", 4)], "8 tokens"),
        ({"long": 3}, (9, 9), [item("x", 0, spans=((0, 4),))], "4 tokens at once"),
    ],
)
def test_what_can_never_be_encoded_is_refused(limits, encoder, media, words) -> None:
    executor = FakeExecutor((Group(4, 64),), encoder=encoder)
    engine, _ = make_engine(executor, Limits(**limits))
    planner = engine.scheduler.planners["media"]
    request = Request(id="a", prompt=[7] * 9, params=SamplingParams(), media=tuple(media))
    with pytest.raises(RequestError, match=words):
        planner.check(request)
    executor.stop()


def test_a_failed_step_encodes_again() -> None:
    executor = FakeExecutor((Group(4, 64),), encoder=(8, 8), fail_steps={0: MemoryError("once")})
    engine, seen = make_engine(executor)
    for name in "ab":
        ask(engine, name, [PLACEHOLDER] * 5, item("x", 0))
        while engine.tick():
            pass
    assert seen.finished["a"].reason == "error"
    assert seen.finished["b"].reason == "length"
    executor.stop()


def test_a_slept_engine_encodes_again() -> None:
    executor = FakeExecutor((Group(4, 64),), encoder=(8, 8))
    engine, _ = make_engine(executor)
    for name in "ab":
        ask(engine, name, [PLACEHOLDER] * 5, item("x", 0))
        while engine.tick():
            pass
        engine.scheduler.forget_prefixes()
    assert executor.encodings == 2
    executor.stop()


SEEN = [9, 9, *[PLACEHOLDER] * 4, 9]


def encoded(plan: Plan) -> EncodePlan:
    """What the step encodes."""
    return plan.parts.get("media", EncodePlan())


def streaming(depth: int, **limits: object):
    """An engine in which a row decodes and encoders have 3 layers, each of them a piece for an
    item of 4.
    """
    executor = FakeExecutor((Group(4, 64),), encoder=(16, 16), encoder_rows=4, keep_plans=True)
    engine, seen = make_engine(executor, Limits(**limits), None, depth)
    ask(engine, "text", [5, 6], tokens=30)
    for _ in range(3):
        engine.tick()
    executor.plans.clear()
    return executor, engine, seen


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_decode_between_the_pieces_of_an_item(depth) -> None:
    executor, engine, seen = streaming(depth)
    ask(engine, "seen", SEEN, item("x", 2))
    ask(engine, "after", [8, 8], tokens=2)
    while engine.tick():
        pass
    firsts = [encoded(plan).rows for plan in executor.plans]
    started = next(i for i, plan in enumerate(executor.plans) if encoded(plan).items)
    ended = max(i for i, plan in enumerate(executor.plans) if len(plan.tokens) > 3)
    # The item's tokens are computed behind its third piece, or where that is first known of.
    assert firsts[started:ended] == [4] * (2 + depth)
    assert not any(firsts[ended:])
    text = executor.plans[started].rows[0]
    assert all(text in plan.rows for plan in executor.plans[started : ended + 1])
    # Who asks behind it does not wait for it.
    order = list(seen.finished)
    assert order.index("after") < order.index("seen")
    words = [9, 9, *encoded_tokens(item("x", 2)), 9]
    assert seen.tokens["seen"] == reference_tokens(words, 3)
    assert seen.tokens["text"] == reference_tokens([5, 6], 30)
    executor.stop()


def test_an_item_that_nobody_waits_beside_is_encoded_whole() -> None:
    executor, engine, seen = streaming(1)
    engine.abort("text")
    ask(engine, "seen", SEEN, item("x", 2))
    while engine.tick():
        pass
    assert {encoded(plan).rows for plan in executor.plans} == {0}
    ask(engine, "text", [5, 6], tokens=30)
    engine.tick()
    ask(engine, "other", SEEN, item("y", 2))
    for _ in range(2):
        engine.tick()
    assert executor.begun
    engine.abort("text")
    engine.tick()
    assert not executor.begun, "where nobody decodes any more, what is left is done at once"
    while engine.tick():
        pass
    words = [9, 9, *encoded_tokens(item("y", 2)), 9]
    assert seen.tokens["other"] == reference_tokens(words, 3)
    executor.stop()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ticks", range(1, 7))
def test_an_abort_between_pieces_drops_what_was_done(depth, ticks) -> None:
    executor, engine, seen = streaming(depth)
    ask(engine, "gone", SEEN, item("x", 2))
    for _ in range(ticks):
        engine.tick()
    engine.abort("gone")
    ask(engine, "seen", [8, *SEEN[1:]], item("y", 2))
    ask(engine, "again", SEEN, item("x", 2))
    while engine.tick():
        pass
    for name, first, kind in (("seen", 8, "y"), ("again", 9, "x")):
        words = [first, 9, *encoded_tokens(item(kind, 2)), 9]
        assert seen.tokens[name] == reference_tokens(words, 3)
    assert not executor.begun
    assert executor.encoded == dict(engine.scheduler.planners["media"].cached)
    executor.stop()


def test_an_abort_drops_pieces_that_nobody_waits_for() -> None:
    executor, engine, _ = streaming(1)
    ask(engine, "gone", SEEN, item("x", 2))
    engine.tick()
    assert executor.begun == {b"x": 2}
    engine.abort("gone")
    engine.tick()
    assert executor.encoded == executor.begun == {}
    executor.stop()


def test_chunks_do_not_end_inside_of_whole_items() -> None:
    for whole, cuts in ((False, [6, 6, 2]), (True, [3, 5, 6])):
        executor = FakeExecutor(
            (Group(1, 64),), encoder=(16, 16), whole_media=whole, keep_plans=True
        )
        engine, seen = make_engine(executor, Limits(tokens=6))
        prompt = [9, 9, 9, *[PLACEHOLDER] * 5, *[PLACEHOLDER] * 4, 9, 9]
        media = item("x", 3, 5), item("y", 8)
        ask(engine, "a", prompt, *media, tokens=1)
        while engine.tick():
            pass
        assert [len(plan.tokens) for plan in executor.plans if len(plan.tokens)] == cuts
        words = [9] * 3 + encoded_tokens(media[0]) + encoded_tokens(media[1]) + [9, 9]
        assert seen.tokens["a"] == reference_tokens(words, 1)
        if whole:
            long = Request(id="b", prompt=[7] * 9, params=SamplingParams(), media=[item("x", 0, 7)])
            with pytest.raises(RequestError, match="7 tokens at once, but a step takes at most 6"):
                engine.scheduler.planners["media"].check(long)
        executor.stop()
