"""Random requests beside each other: with the default drafts each answer is that of plain decoding.

Texts repeat, so that drafts are accepted: by the embedded model, which goes on with what repeats,
and by requests that are asked again, whose earlier answers are drafted from.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from drafted import accepted, any_counts, outcome

from modulm import LLM, SamplingParams
from modulm.contracts.requests import Finish
from modulm.contracts.sampling import LogitsProcessor, StructuredOutputs
from modulm.errors import RequestError

JSON = {"type": "array", "items": {"enum": ["aa", "ab", 1, 22]}, "maxItems": 6}
GRAMMARS = [
    StructuredOutputs(json=JSON), StructuredOutputs(choice=["abcabcabc", "abababab"]),
    StructuredOutputs(regex="(ab|ba){3,9}"),
]  # fmt: skip
#: Engines: few blocks, so that rows are preempted; prompts in pieces; priorities; nothing cached;
#: grammars of the other backend.
ENGINES: list[dict[str, Any]] = [
    {"num_gpu_blocks_override": 26, "max_num_batched_tokens": 32},
    {"num_gpu_blocks_override": 22, "scheduling_policy": "priority", "max_num_seqs": 5},
    {"enable_prefix_caching": False, "max_num_seqs": 3, "num_gpu_blocks_override": 60},
    {
        "structured_outputs_config": {"backend": "llguidance", "compile_workers": 1},
        "max_num_batched_tokens": 24, "num_gpu_blocks_override": 40,
    },
]  # fmt: skip


class Failing(LogitsProcessor):
    """Fails behind as many tokens as the request says."""

    api = 1

    def admit(self, view) -> bool:
        return "fails" in (view.params.extra_args or {})

    @classmethod
    def validate(cls, params) -> None:
        if (params.extra_args or {}).get("fails") == 0:
            raise RequestError("at least 1", "fails")

    def apply_row(self, view, logits):
        if len(view.output) >= view.params.extra_args["fails"]:
            raise ValueError("on purpose")
        return logits


def some_params(draw: random.Random) -> SamplingParams:
    """Parameters of which each has a few of everything that may end or change an answer."""
    chosen: dict[str, Any] = {
        "max_tokens": draw.randint(1, 28), "temperature": draw.choice([0, 0, 0.7, 1.2]),
        "seed": draw.randrange(100),
    }  # fmt: skip
    settings: list[dict[str, Any]] = [
        {"logprobs": draw.randint(0, 4)}, {"prompt_logprobs": draw.randint(0, 2)},
        {"stop": draw.choice([["e"], ["th", " a"], ["1"]])}, {"ignore_eos": True},
        {"min_tokens": draw.randint(1, 12)}, {"repetition_penalty": draw.choice([1.2, 0.8])},
        {"presence_penalty": 0.6, "frequency_penalty": 0.3}, {"top_k": 5, "min_p": 0.02},
        {"top_p": 0.8}, {"logit_bias": {draw.randrange(3, 300): draw.choice([4.0, -100.0])}},
        {"bad_words": ["the", "a b"]}, {"stop_token_ids": [draw.randrange(3, 300), 17]},
        {"n": 2}, {"n": 3, "best_of": 3, "logprobs": 1}, {"include_stop_str_in_output": True},
        {"structured_outputs": draw.choice(GRAMMARS)}, {"extra_args": {"fails": 5}},
        {"repetition_detection": {"max_pattern_size": 6, "min_count": 3, "min_pattern_size": 1}},
        {"allowed_token_ids": sorted(draw.sample(range(3, 400), 40))}, {"detokenize": False},
        {"speculative": draw.choice([0, 1, 3])}, {"logprob_token_ids": [5, 9], "logprobs": 1},
    ]  # fmt: skip
    for each in draw.sample(settings, draw.randint(0, 5)):
        chosen |= each
    if "stop" in chosen:
        chosen.pop("detokenize", None)
    chosen["min_tokens"] = min(chosen.get("min_tokens", 0), chosen["max_tokens"])
    return SamplingParams(**chosen)


def some_requests(draw: random.Random, count: int) -> list[tuple[list[int], dict[str, Any], int]]:
    """Prompt, arguments, and with how many tokens it is aborted (0: never); some come twice."""
    words = [[draw.randrange(3, 500) for _ in range(draw.randint(1, 6))] for _ in range(4)]
    requests: list[Any] = []
    for _ in range(count):
        if requests and draw.random() < 0.4:
            requests.append(draw.choice(requests))
            continue
        prompt = (draw.choice(words) * draw.randint(1, 12))[: draw.randint(4, 60)]
        more = {"params": some_params(draw), "priority": draw.randint(0, 2)}
        requests.append((prompt, more, draw.choice([0, 0, 0, 0, draw.randint(1, 9)])))
    return requests


def run(llm: LLM, requests: Any, draw: random.Random) -> list[Any]:
    """The outputs of requests that arrive one by one, at most nine at once."""
    states, running = [], {}
    for number, (prompt, more, _) in enumerate(requests):
        pending = llm._input_processor.process(
            {"prompt_token_ids": prompt}, request_id=str(number), **more
        )
        llm._output_processor.add(pending.state)
        llm._core.submit(*pending.requests)
        llm._core.loop.wait_prepared(part.id for part in pending.requests)
        states.append(pending.state)
        running[number] = pending.state
        most = draw.choice([0, 4, 8]) if number + 1 < len(requests) else 0
        while len(running) > most:
            if not llm._core.loop.tick() and not all(s.finished for s in running.values()):
                llm._core.loop.wait()
            for index, state in running.items():
                if 0 < requests[index][2] <= len(state.choices[0].tokens):
                    for identity in llm._output_processor.abort(state):
                        llm._core.loop.abort(identity)
            running = {index: state for index, state in running.items() if not state.finished}
    return [taken(state) for state in states]


def taken(state: Any) -> Any:
    """A request's output; one that failed because nothing could be sampled: as `LLM` gives it."""
    try:
        return state.take()
    except RequestError as error:
        for choice in state.choices:
            choice.finish(Finish(state.id, "error", None, error))
        state.error = None
        return state.take()


@pytest.mark.parametrize("number", range(len(ENGINES)))
def test_random_requests(monkeypatch, rng, rounds, number) -> None:
    any_counts(monkeypatch)
    requests = [r for _ in range(rounds) for r in some_requests(rng, 30)]
    order, found = rng.random(), []
    flags = {"max_model_len": 128, "logits_processors": [Failing], **ENGINES[number]}
    for speculative in ("off", "auto"):
        with LLM("demo", speculative=speculative, **flags) as llm:
            found.append(run(llm, requests, random.Random(order)))
    for index, (plain, drafted) in enumerate(zip(*found, strict=True)):
        one, other = outcome(plain), outcome(drafted)
        if requests[index][2]:  # a step with drafts may end behind the token that aborts
            for mine, theirs in zip(plain.outputs, drafted.outputs, strict=True):
                count = min(len(mine.token_ids), len(theirs.token_ids))
                assert mine.token_ids[:count] == theirs.token_ids[:count], requests[index]
            continue
        assert one == other, (index, requests[index])
    assert accepted(found[1]) > 40
