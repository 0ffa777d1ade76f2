"""Any drafter beside any kind of model gives the answers of single steps, and leaves no trace.

`test_drafts.py` holds the same for every sampling parameter; here are drafters that know nothing,
models with recurrent states, answers in several parts, priorities, preemption and aborts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from samples import parametrize_sample, sample

from modulm import LLM, SamplingParams
from modulm.contracts.sampling import StructuredOutputs
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.drafters import FakeDrafter, drafting_executor

ARCHITECTURES = [
    "LlamaForCausalLM", "Mamba2ForCausalLM", "GraniteMoeHybridForCausalLM", "KimiLinearForCausalLM",
]  # fmt: skip
PROMPTS = [[5, 99, 7, 30], [17], [8] * 21, [7, 9, 11, 13] * 9, [3, 4, 5], [6, 7], [30, 31, 32]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=16, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=5, max_tokens=16, logprobs=0, n=2, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(temperature=0.9, seed=1, max_tokens=16, frequency_penalty=0.6, min_tokens=5),
    SamplingParams(temperature=0, max_tokens=20, stop=["e", "th"], min_tokens=2, ignore_eos=True),
    SamplingParams(
        temperature=1, seed=2, max_tokens=20,
        structured_outputs=StructuredOutputs(json={"type": "array", "items": {"enum": [1, 22]}}),
    ),
    SamplingParams(temperature=0.7, seed=3, max_tokens=16, top_k=9, min_p=0.01, best_of=2),
]  # fmt: skip


def random_tokens(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    """Tokens that exist, and nothing else is known of them; some right ones among them."""
    draw = random.Random(str(history))
    good = list(coming[: draw.randint(0, len(coming))])
    return [*good, *(draw.randrange(3, 60) for _ in range(draw.randint(0, 6)))]


def out_of_range(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    """Tokens that do not exist, behind right ones."""
    return [*coming[: len(history) % 3], [-1, 10**9, 2**40][len(history) % 3], *coming]


def nothing(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    return []


def too_many(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
    return [*coming, *range(3, 60)]


@pytest.fixture(scope="module", params=sample(ARCHITECTURES, every=3))
def folder(request, tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("drafts") / request.param, request.param))


def opened(folder: str, drafter: FakeDrafter | None, **flags: object) -> LLM:
    if drafter is not None:
        manager.current().register("executors", "drafting", drafting_executor(drafter))
        flags = {**flags, "distributed_executor_backend": "drafting"}
    return LLM(folder, max_model_len=128, max_num_batched_tokens=48, **flags)


def outcome(output) -> list[tuple]:
    """Of each choice: tokens, text, why it ended, and logprobs to the bit."""
    return [
        (
            answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason,
            [[(t, e.logprob, e.rank) for t, e in place.items()] for place in answer.logprobs or ()],
        )
        for answer in output.outputs
    ]  # fmt: skip


def answers(folder: str, drafter: FakeDrafter | None, **flags: object) -> list[list[tuple]]:
    """Twice, so that the second time prefixes are found, with priorities."""
    with manager.using(PluginManager()), opened(folder, drafter, **flags) as llm:
        given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = []
        for _ in range(2):
            order = list(range(len(given)))
            found += llm.generate(given, PARAMS, use_tqdm=False, priority=order[::-1])
    return [outcome(output) for output in found]


FLAGS = {"num_gpu_blocks_override": 24, "scheduling_policy": "priority"}


@pytest.fixture(scope="module")
def expected(folder):
    return answers(folder, None, **FLAGS)


@parametrize_sample("propose", [random_tokens, out_of_range, nothing, too_many], every=3)
def test_any_drafter_gives_the_answers_of_single_steps(folder, expected, propose) -> None:
    whole = [[*p, *told[0][0]] for p, told in zip(PROMPTS, expected, strict=False)]
    drafter = FakeDrafter(propose, whole)
    assert answers(folder, drafter, **FLAGS) == expected
    assert drafter.steps


def held(llm: LLM) -> list[tuple[int, int]]:
    """Blocks or slots in use, and all there are, of each group of the cache."""
    groups = llm._core.loop.scheduler.cache.groups
    return [(group.pool.used, group.pool.free) for group in groups]


@parametrize_sample("count", [400, 2_000], every=2)
def test_requests_and_aborts_leave_the_pools_as_they_were(folder, count) -> None:
    """Requests through a few blocks, some of which end in the middle of a drafted run."""
    from modulm_frontend.output_processor import RequestState

    draw = random.Random(7)
    words = [[draw.randrange(3, 60) for _ in range(200)] for _ in range(4)]

    def guesses(history: Sequence[int], coming: Sequence[int]) -> Sequence[int]:
        return words[len(history) % 4][: len(history) % 7]

    drafter = FakeDrafter(guesses, [])
    with manager.using(PluginManager()), opened(folder, drafter, **FLAGS) as llm:
        llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=2), use_tqdm=False)
        llm._core.loop.scheduler.forget_prefixes()
        before = held(llm)
        waiting: dict[str, RequestState] = {}
        for number in range(count):
            params = SamplingParams(
                max_tokens=draw.randint(1, 6), temperature=draw.choice([0, 1]), seed=number,
                ignore_eos=True,
            )  # fmt: skip
            prompt = {"prompt_token_ids": draw.choice(words)[: draw.randint(1, 30)]}
            pending = llm._input_processor.process(prompt, params, f"soak-{number}")
            llm._output_processor.add(pending.state)
            llm._core.submit(*pending.requests)
            waiting[pending.state.id] = pending.state
            while len(waiting) > 12 or (number == count - 1 and waiting):
                llm._core.loop.tick()
                if draw.random() < 0.25:
                    gone = draw.choice(sorted(waiting))
                    for identity in llm._output_processor.abort(waiting[gone]):
                        llm._core.loop.abort(identity)
                waiting = {name: state for name, state in waiting.items() if not state.finished}
        while llm._core.loop.tick():
            pass
        llm._core.loop.scheduler.forget_prefixes()
        assert held(llm) == before
        assert len(llm._output_processor) == 0
        assert len(drafter.released) >= count // 2
        assert sum(len(each) for each in (step.rows for step in drafter.steps)) > count
