from __future__ import annotations

import numpy as np
import pytest

from modulm.contracts.executor import Plan, RowFailure, RowStart, StepResult
from modulm.contracts.sampling import PoolingParams, SamplingParams
from modulm.testing.fakes import FakeExecutor, FakeFault, Group, Script, reference_tokens

PROMPT = [5, 6, 7, 8, 9, 10, 11]
GREEDY = SamplingParams(temperature=0.0)


def admit(row: int = 0, params=GREEDY, output=(), seed=None, prompt=PROMPT, name="a") -> RowStart:
    return RowStart(row, name, params, np.array(prompt), np.array(output, dtype=np.int64), seed)


def plan(step, start, tokens, tables, samples=True, row=0, admit=(), release=()) -> Plan:
    return Plan(
        step=step,
        rows=np.array([row], dtype=np.int32),
        starts=np.array([start], dtype=np.int32),
        counts=np.array([len(tokens)], dtype=np.int32),
        tokens=np.array(tokens, dtype=np.int64),
        tables=tuple(np.array([t], dtype=np.int32) for t in tables),
        samples=np.array([samples]),
        admit=tuple(admit),
        release=tuple(release),
    )


def generate(fake: FakeExecutor, tables, chunks, count, placeholder=False, **kw) -> list[int]:
    """Prefill PROMPT in `chunks`, then decode `count` tokens."""
    at, got = 0, []
    for i, size in enumerate(chunks):
        last = i == len(chunks) - 1
        first = [admit(**kw)] if i == 0 else []
        result = fake.run(plan(i, at, PROMPT[at : at + size], tables, last, admit=first))
        at += size
    got.append(int(result.tokens[0]))
    while len(got) < count:
        token = -1 if placeholder else got[-1]
        result = fake.run(plan(at, at, [token], tables))
        got.append(int(result.tokens[0]))
        at += 1
    return got


@pytest.mark.parametrize("chunks", [[7], [1, 6], [3, 3, 1], [1] * 7])
@pytest.mark.parametrize("windows", [(None,), (None, 4), (3, None)])
def test_tokens_are_the_oracles_for_any_chunks_and_tables(chunks, windows) -> None:
    fake = FakeExecutor([Group(4, 16, w) for w in windows])
    tables = [[9, 3, 12, 1], [2, 15, 4, 8]][: len(windows)]
    expected = reference_tokens(PROMPT, 8, windows=windows)
    assert generate(fake, tables, chunks, 8) == expected
    assert len(set(expected)) > 4


def test_placeholders_stand_for_the_last_token() -> None:
    fake = FakeExecutor([Group(4, 16)])
    assert generate(fake, [[3, 2, 1, 4]], [7], 6, True) == reference_tokens(PROMPT, 6)


def test_a_seed_matters_only_to_rows_that_are_not_greedy() -> None:
    warm = SamplingParams(temperature=1.0)
    got = generate(FakeExecutor([Group(4, 16)]), [[1, 2, 3]], [7], 3, params=warm, seed=4)
    assert got == reference_tokens(PROMPT, 3, seed=4) != reference_tokens(PROMPT, 3)
    assert generate(FakeExecutor([Group(4, 16)]), [[1, 2, 3]], [7], 3, seed=4) == (
        reference_tokens(PROMPT, 3)
    )


@pytest.mark.parametrize(
    ("start", "tokens", "tables", "more", "message"),
    [
        (7, [-1], [[3, 5]], {}, "holds"),
        (7, [-1], [[3, 0]], {}, "null block"),
        (7, [-1], [[3, 16]], {}, "outside of the pool"),
        (7, [-1, -1], [[3, 4]], {}, "knows 8 tokens"),
        (7, [-1], [[3]], {}, "needs 2 blocks, its table has 1"),
        (7, [-1], [[1, 4]], {}, "should hold position 0"),
        (6, [11, -1], [[3, 4]], {}, "7 tokens are computed"),
        (7, [3], [[3, 4]], {}, "its history says"),
        (7, [-1], [[3, 4]], {"row": 1}, "not admitted"),
        (7, [-1], [], {}, "cache groups"),
        (7, [-1], [[3, 4]], {"release": [5]}, "releases row 5"),
        (7, [-1], [[3, 4]], {"admit": [admit()]}, "is taken"),
    ],
)
def test_an_inconsistent_plan_is_named(start, tokens, tables, more, message) -> None:
    fake = FakeExecutor([Group(4, 16)])
    fake.run(plan(0, 0, PROMPT, [[3, 4]], admit=[admit()]))
    with pytest.raises(FakeFault, match=message):
        fake.run(plan(1, start, tokens, tables, **more))


def test_a_block_that_another_row_overwrote_changes_the_tokens_or_fails() -> None:
    fake = FakeExecutor([Group(8, 16)])
    fake.run(plan(0, 0, PROMPT, [[3]], admit=[admit()]))
    other = [t + 1 for t in PROMPT]
    fake.run(plan(1, 0, other, [[3]], row=1, admit=[admit(1, prompt=other, name="b")]))
    result = fake.run(plan(2, 7, [-1], [[3]]))
    assert int(result.tokens[0]) != reference_tokens(PROMPT, 2)[1]


def test_scripts() -> None:
    scripts = {"a": Script(tokens=[1, 2], errors={2: "broken on purpose"})}
    fake = FakeExecutor([Group(4, 16)], scripts=scripts)
    assert generate(fake, [[3, 4, 5]], [7], 2) == [1, 2]
    for step, start in ((20, 8), (21, 9)):
        result = fake.run(plan(step, start, [-1], [[3, 4, 5]]))
        assert (result.tokens.tolist(), result.accepted.tolist()) == ([], [0])
        assert result.errors == {0: RowFailure("broken on purpose")}
    fake.run(plan(22, 0, PROMPT, [[3, 4]], admit=[admit()], release=[0]))
    assert list(fake.rows) == [0]


def test_crash_hang_and_failing_step() -> None:
    crash = {"a": Script(crash=0)}
    first = plan(0, 0, PROMPT, [[3, 4]], admit=[admit()])
    with pytest.raises(RuntimeError, match="token 0"):
        FakeExecutor([Group(4, 16)], scripts=crash).run(first)
    with pytest.raises(MemoryError):
        FakeExecutor([Group(4, 16)], fail_steps={0: MemoryError()}).run(first)
    fake = FakeExecutor([Group(4, 16)], scripts={"a": Script(hang=0)})
    future = fake.submit(first)
    assert not future.done()
    fake.resume.set()
    assert isinstance(future.result(300), StepResult)
    fake.stop()
    fake.stop()


def test_logprobs_and_pooling() -> None:
    fake = FakeExecutor([Group(4, 16)])
    params = SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=0)
    fake.run(plan(0, 0, PROMPT[:3], [[3, 4]], False, admit=[admit(params=params)]))
    result = fake.run(plan(1, 3, PROMPT[3:], [[3, 4]]))
    assert len(result.logprobs[0][0].ids) == 3
    assert [int(p.ids[0]) for p in result.prompt_logprobs[0]] == PROMPT[4:]
    result = fake.run(
        plan(2, 0, PROMPT, [[5, 6]], row=1, admit=[admit(1, PoolingParams(), name="p")])
    )
    assert (result.tokens.tolist(), result.accepted.tolist()) == ([], [0])
    (pooled,) = (report.value for report in result.parts if report.part == "pooling")
    assert pooled[1].shape == (2,)
