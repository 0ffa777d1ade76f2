"""Prefixes that requests mark stay in the KV cache while others are evicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from modulm import LLM, SamplingParams
from modulm.contracts.requests import Request
from modulm.errors import RequestError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty
from modulm_prefix_retention.holdings import Holding, Holdings
from modulm_prefix_retention.marks import Mark, key_of, marks_of, with_marks

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 256,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 40,
    "cpu_threads": 1,
}
PLAIN = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
PROMPT = {"prompt_token_ids": [5, 9, 40, 7] * 24}
#: Prompts that take more blocks than the pool has.
OTHERS = [{"prompt_token_ids": [10 + i, 9, 40, 7] * 50} for i in range(12)]


def marked(*marks: tuple[int, float], key: str = "") -> SamplingParams:
    return with_marks(PLAIN, [Mark(*mark) for mark in marks], key)


def run(llm: LLM, params: SamplingParams = PLAIN, prompt: Any = PROMPT) -> tuple[Any, Any, Any]:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.num_cached_tokens, output.retained, output.outputs[0].token_ids


def press(llm: LLM) -> None:
    """Evict everything that is not held."""
    llm.generate(OTHERS, PLAIN, use_tqdm=False)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_tiny(tmp_path_factory.mktemp("model"), "Gemma3ForCausalLM")
    with LLM(str(folder), **FLAGS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _empty(llm: LLM) -> None:
    llm.reset_prefix_cache()
    check_empty(llm._core.loop)


def test_a_marked_prefix_survives_pressure(llm: LLM) -> None:
    cached, held, expected = run(llm, marked((70, 300)))
    assert (cached, list(held)) == (0, [[64, 300]])
    press(llm)
    assert run(llm) == (64, (), expected)
    llm.reset_prefix_cache()
    run(llm)
    press(llm)
    assert run(llm)[0] == 0


def test_each_mark_has_a_time_of_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = llm._core.loop.scheduler.planners["prefix_retention"]
    now = planner._clock() + 1000
    monkeypatch.setattr(planner, "_clock", lambda: now)
    assert list(run(llm, marked((32, 3600), (96, 300)))[1]) == [[32, 3600], [96, 300]]
    now += 299
    assert run(llm)[0] == 64  # the last token of a prompt is computed, so its block is too
    now += 299  # each use begins the time again
    press(llm)
    assert run(llm)[0] == 64
    now += 301
    press(llm)
    assert run(llm)[0] == 32
    now += 3601
    press(llm)
    assert run(llm)[0] == 0
    monkeypatch.undo()
    planner._next = 0.0


def test_a_key_holds_its_share(llm: LLM) -> None:
    # A quarter of 39 blocks is 9, and half of that 4, for one key.
    held = run(llm, marked((200, 300)), OTHERS[0])[1]
    assert list(held) == [[128, 300]]
    assert list(run(llm, marked((96, 300)))[1]) == [[96, 300]]
    press(llm)
    assert run(llm, prompt=OTHERS[0])[0] == 0
    assert run(llm)[0] == 64


def test_a_request_as_long_as_the_pool_runs(llm: LLM) -> None:
    # Holdings leave room for one sequence of the maximum length.
    for index, prompt in enumerate(OTHERS):
        run(llm, marked((128, 300), key=str(index)), prompt)
    pool = llm._core.loop.scheduler.cache.groups[0].pool
    assert 0 < pool.used <= 9
    long = SamplingParams(temperature=0, max_tokens=250, ignore_eos=True)
    prompts = [{"prompt_token_ids": [60 + i]} for i in range(4)]
    outputs = llm.generate(prompts, long, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [250] * 4


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"marks": [[1, 0]]}, "seconds must be more than 0"),
        ({"marks": [[1]]}, "tokens, seconds"),
        ({"marks": [[-1, 5]]}, "tokens must be"),
        ({"marks": [[1, 5]] * 5}, "at most 4"),
        ({"ttl": 1}, "no field 'ttl'"),
        ({"key": 1}, "key must be"),
        ([], "must be an object"),
    ],
)
def test_malformed_marks_are_refused(table: Any, words: str) -> None:
    params = PLAIN.with_(extra_args={"prefix_retention": table})
    request = Request(id="a", prompt=[1, 2], params=params)
    with pytest.raises(RequestError, match=words):
        marks_of(request), key_of(request)


def holding(tenant: str, key: str, *blocks: int) -> Holding:
    return Holding(tenant, key, len(blocks), (blocks,), 60.0, 60.0)


def test_limits_of_keys_and_of_all() -> None:
    released: list[Any] = []
    holdings = Holdings([6], [4], released.append)
    holdings.put(b"a", holding("x", "one", 1, 2))
    holdings.put(b"b", holding("x", "one", 1, 2, 3))  # blocks count once
    assert not released
    holdings.put(b"c", holding("x", "one", 4, 5))
    assert released == [((1, 2),), ((1, 2, 3),)]  # the least recently used ones of the key
    holdings.put(b"d", holding("x", "two", 6, 7))
    holdings.put(b"e", holding("y", "", 8, 9, 10))
    # The tenant with the most blocks gives way, whatever the keys that it names.
    assert released[2:] == [((4, 5),)]
    assert b"e" in holdings
    holdings.expire(60.0)
    assert len(holdings) == 0
