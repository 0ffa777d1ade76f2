"""Rows that nobody samples skip the last layer after its attention; nothing else changes."""

from __future__ import annotations

import pytest

from modulm import LLM, SamplingParams
from modulm.testing.checkpoints import make_tiny

PROMPTS = [list(range(5, 75)), [9, 4, 8] * 30, [17]]
PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)


#: The pre-norm block, with norms after its branches, and with its branches side by side.
BLOCKS = ("Qwen3MoeForCausalLM", "Glm4ForCausalLM", "PhiForCausalLM")


@pytest.fixture(scope="module", params=BLOCKS)
def llm(request, tmp_path_factory):
    folder = make_tiny(tmp_path_factory.mktemp("last") / "tiny", request.param)
    flags = {"enable_prefix_caching": False, "num_gpu_blocks_override": 64}
    with LLM(str(folder), max_num_batched_tokens=64, max_model_len=128, **flags) as made:
        yield made


@pytest.fixture
def counted(llm, monkeypatch):
    """Numbers of tokens that went through the feed-forward part of the first and the last layer,
    and through the output projection of the last one's attention.
    """
    counts: dict[int | str, list[int]] = {0: [], -1: [], "out": []}
    layers = llm._core.loop.executor._worker.runner.model.layers
    for index, list_of in counts.items():
        module = layers[-1].attn.out if index == "out" else layers[index].mlp

        def forward(x, whole=module.forward, seen=list_of):
            seen.append(len(x))
            return whole(x)

        monkeypatch.setattr(module, "forward", forward)
    return counts


def answers(llm, params=PARAMS):
    requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs)
        for output in llm.generate(requests, params, use_tqdm=False)
    ]


def test_the_last_layer_computes_what_is_sampled(llm, counted, monkeypatch) -> None:
    narrow = answers(llm)
    first, last = sum(counted[0]), sum(counted[-1])
    assert first > sum(map(len, PROMPTS))
    assert last == first - sum(map(len, PROMPTS)) + len(PROMPTS)
    assert sum(counted["out"]) == last
    monkeypatch.setattr(llm._core.loop.executor._worker.runner, "_narrow", False)
    assert answers(llm) == narrow
    assert sum(counted[-1]) - last >= sum(map(len, PROMPTS))


def test_a_scored_prompt_is_computed_whole(llm, counted) -> None:
    scored = answers(llm, PARAMS.with_(prompt_logprobs=0))
    assert counted[0] == counted[-1] == counted["out"]
    assert [len(each[2]) for each in scored] == [len(prompt) for prompt in PROMPTS]
    assert [each[:2] for each in scored] == [each[:2] for each in answers(llm)]
