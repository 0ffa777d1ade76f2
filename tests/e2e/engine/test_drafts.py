"""A drafter beside a real model changes no token and no logprob, whatever it proposes."""

from __future__ import annotations

import pytest
import torch
from samples import parametrize_sample, sample

from modulm import LLM, SamplingParams
from modulm.contracts.drafter import Needs
from modulm.contracts.executor import Executor
from modulm.contracts.model import CacheSpec
from modulm.contracts.sampling import LogitsProcessor, StructuredOutputs
from modulm.errors import UnsupportedError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.drafters import (
    FakeDrafter,
    adversarial,
    drafting_executor,
    mixed,
    right,
    wrong,
)

PLAIN = {"kernels": "none", "attention_backend": "sdpa", "batch_invariant": True}
SMALL = {"num_gpu_blocks_override": 14, "block_size": 16}
SHARED = [7, 9, 11, 13] * 9
PROMPTS = [
    [5, 99, 7, 300], [17], [8] * 21, [*SHARED, 40], [*SHARED, 41], list(range(100, 130)),
    [3, 4, 5], [6, 7], [30, 31, 32, 33], [77] * 5, [50, 51],
]  # fmt: skip
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14),
    SamplingParams(temperature=0, max_tokens=14, logprobs=3),
    SamplingParams(temperature=1.2, seed=5, max_tokens=14, logprobs=0, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(temperature=0.9, seed=1, max_tokens=12, frequency_penalty=0.6, logprobs=2),
    SamplingParams(temperature=0, max_tokens=12, min_tokens=9, logit_bias={40: 3.0}),
    SamplingParams(
        temperature=0, max_tokens=12, structured_outputs=StructuredOutputs(choice=["abca", "abab"]),
    ),
    SamplingParams(
        temperature=1, seed=2, max_tokens=20, logprobs=1,
        structured_outputs=StructuredOutputs(json={"type": "array", "items": {"enum": [1, 22]}}),
    ),
    SamplingParams(temperature=0, max_tokens=12, bad_words=("the", "a b"), prompt_logprobs=1),
    SamplingParams(temperature=0.7, seed=3, max_tokens=14, top_k=9, min_p=0.01),
    SamplingParams(temperature=0, max_tokens=1),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("drafts") / "tiny"))


def outcome(output) -> tuple:
    """Tokens, text, why it ended, and logprobs to the bit."""
    answer = output.outputs[0]
    logprobs = [
        {token: (entry.logprob, entry.rank) for token, entry in position.items()}
        for position in answer.logprobs or ()
    ]
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, logprobs


def answers(folder, params, flags, drafter=None, prompts=PROMPTS):
    with manager.using(PluginManager()) as plugins:
        if drafter is not None:
            plugins.register("executors", "drafting", drafting_executor(drafter))
            flags = {**flags, "distributed_executor_backend": "drafting"}
        flags = {"num_gpu_blocks_override": 80, **flags}
        with LLM(folder, max_model_len=128, max_num_batched_tokens=48, **flags) as llm:
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            steps = llm._core.loop.scheduler.gauges().step
            outputs = llm.generate(given, params, use_tqdm=False)
            again = llm.generate(given[:2], params[:2], use_tqdm=False)
            steps = llm._core.loop.scheduler.gauges().step - steps
    return [outcome(output) for output in [*outputs, *again]], steps


@pytest.fixture(scope="module", params=sample(["few blocks", "compiled", "torch"], every=3))
def reference(request, folder):
    flags = {"torch": PLAIN, "compiled": {}, "few blocks": SMALL}[request.param]
    stops = [answers(folder, PARAMS, flags)[0][place][0][4] for place in (0, 2)]
    params = list(PARAMS)
    params[0] = params[0].with_(stop_token_ids=(stops[0],))
    params[2] = params[2].with_(stop_token_ids=(stops[1],), include_stop_str_in_output=True)
    expected, steps = answers(folder, params, flags)
    return flags, params, expected, steps


@parametrize_sample("propose", [right, wrong, mixed, adversarial], every=4)
def test_drafts_change_no_token_and_no_logprob(folder, reference, propose) -> None:
    flags, params, expected, steps = reference
    whole = [[*p, *told[0]] for p, told in zip(PROMPTS, expected, strict=False)]
    drafter = FakeDrafter(propose, whole)
    found, taken = answers(folder, params, flags, drafter)
    assert found == expected
    if propose is right:
        assert taken < 0.7 * steps
    assert drafter.released
    for step in drafter.steps:
        assert step.hidden.shape[0] == len(step.batch.tokens)
        assert len(step.rows) == len(step.histories) == len(step.most) == len(step.accepted)
    assert drafter.ran
    assert all(known == ran for known, ran in drafter.ran)


def test_a_drafter_that_raises_is_switched_off(folder, caplog) -> None:
    flags, params = {}, PARAMS[:4]
    expected, _ = answers(folder, params, flags, prompts=PROMPTS[:4])
    whole = [[*p, *told[0]] for p, told in zip(PROMPTS, expected, strict=False)]
    drafter = FakeDrafter(right, whole, fails_at=3)
    found, _ = answers(folder, params, flags, drafter, prompts=PROMPTS[:4])
    assert found == expected
    assert len(drafter.steps) == 3
    assert "drafter fake failed and is disabled" in caplog.text


class Failing(LogitsProcessor):
    """Fails behind five tokens."""

    api = 1

    def admit(self, view) -> bool:
        return True

    def apply_row(self, view, logits):
        if len(view.output) == 5:
            raise ValueError("on purpose")
        return logits


def test_a_row_that_fails_behind_accepted_drafts_keeps_them(folder) -> None:
    params, prompts = PARAMS[1:2], PROMPTS[:1]
    whole, _ = answers(folder, params, {}, prompts=prompts)
    flags = {"logits_processors": [Failing]}
    expected, steps = answers(folder, params, flags, prompts=prompts)
    drafter = FakeDrafter(right, [[*PROMPTS[0], *whole[0][0]]])
    found, taken = answers(folder, params, flags, drafter, prompts=prompts)
    assert found == expected
    assert (len(found[0][0]), found[0][2]) == (5, "error")
    assert taken < steps


def test_a_drafters_caches_lie_in_the_models_blocks(folder) -> None:
    from modulm.testing.session import Session

    spec = Session(folder, rows=1).model.caches[0].spec
    expected, _ = answers(folder, PARAMS[:2], {}, prompts=PROMPTS[:2])
    whole = [[*p, *told[0]] for p, told in zip(PROMPTS, expected, strict=False)]
    drafter = FakeDrafter(right, whole, caches=(CacheSpec("draft.0", spec),))
    found, _ = answers(folder, PARAMS[:2], {}, drafter, prompts=PROMPTS[:2])
    assert found == expected
    first, *_, own = drafter.steps[0].batch.caches
    assert own.shape == first.shape
    assert own.data_ptr() != first.data_ptr()
    assert drafter.steps[0].batch.groups[-1] == drafter.steps[0].batch.groups[0]


class LayerDrafter(FakeDrafter):
    """Keeps what the layers gave at the places that count."""

    needs = Needs(hidden=True, layers=(0, 2))

    def propose(self, step):
        self.seen = getattr(self, "seen", [])
        at = torch.from_numpy(step.accepted)
        for place, history in enumerate(step.histories):
            states = [tensor[at[place]].clone() for tensor in (step.hidden, *step.layers)]
            self.seen.append((history[:-1].tolist(), states))
        return super().propose(step)


@parametrize_sample("flags", [{}, {"enforce_eager": True}, PLAIN], every=3)
def test_a_drafter_sees_what_single_layers_give(folder, flags) -> None:
    from transformers import AutoModelForCausalLM

    given = {"dtype": "float32", **flags}
    expected, _ = answers(folder, PARAMS[:1], given, prompts=PROMPTS[:1])
    drafter = LayerDrafter(mixed, [[*PROMPTS[0], *expected[0][0]]])
    found, _ = answers(folder, PARAMS[:1], given, drafter, prompts=PROMPTS[:1])
    assert found == expected
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    raw = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _m, _a, out, i=index: raw.__setitem__(i, out))
    assert len(drafter.seen) > 5
    for history, states in drafter.seen:
        with torch.no_grad():
            last = model.model(torch.tensor([history])).last_hidden_state
        for mine, theirs in zip(states, (last, raw[0], raw[2]), strict=True):
            torch.testing.assert_close(mine, theirs.reshape(-1, 64)[-1], atol=2e-4, rtol=2e-4)


def test_layers_that_a_model_does_not_show_end_the_start(folder) -> None:
    drafter = LayerDrafter(mixed, [[1]])
    drafter.needs = Needs(layers=(7,))
    with pytest.raises(UnsupportedError, match="no layer 7: the model has 3"):
        answers(folder, PARAMS[:1], {}, drafter, prompts=PROMPTS[:1])


@parametrize_sample(
    "constraint",
    [StructuredOutputs(choice=["abcabca", "abcabab"]), StructuredOutputs(regex="[ab]{9}")],
    every=2,
)
def test_what_a_grammar_forbids_is_not_verified(folder, constraint) -> None:
    params = [SamplingParams(temperature=0, max_tokens=12, structured_outputs=constraint)]
    expected, _ = answers(folder, params, {}, prompts=PROMPTS[:1])
    told = [*PROMPTS[0], *expected[0][0]]
    seen: list[int] = []

    class Watched(drafting_executor(FakeDrafter(adversarial, [told]))):
        def run(self, plan):
            result = super().run(plan)
            proposed = (report.value for report in result.parts if report.part == "drafts")
            seen.extend(token for rows in proposed for each in rows.values() for token in each)
            return result

        submit = Executor.submit

    for propose, some in ((right, True), (forbidden, False)):
        Watched.drafter = FakeDrafter(propose, [told])
        seen.clear()
        with manager.using(PluginManager()) as plugins:
            plugins.register("executors", "drafting", Watched)
            flags = {"distributed_executor_backend": "drafting", "num_gpu_blocks_override": 80}
            with LLM(folder, max_model_len=128, **flags) as llm:
                prompt = {"prompt_token_ids": PROMPTS[0]}
                assert outcome(llm.generate([prompt], params, use_tqdm=False)[0]) == expected[0]
        assert Watched.drafter.steps
        assert seen or not some
        assert not set(seen) & set(FORBIDDEN)


#: Tokens that no grammar of letters allows.
FORBIDDEN = [300, 301, 302]


def forbidden(history, coming):
    return FORBIDDEN
