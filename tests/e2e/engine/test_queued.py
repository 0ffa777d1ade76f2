"""On a device with a queue a step is launched before the tokens of the one before are known."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from modulm import LLM, SamplingParams
from modulm.contracts.sampling import StructuredOutputs
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.queued import HostRead, QueuedPlatform

PROMPTS = [[5, 99, 7, 300], [17], [8] * 24, [7, 9, 11], list(range(100, 120))]
FREE = [
    SamplingParams(temperature=0, max_tokens=6),
    SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=5, max_tokens=6, logprobs=0, top_p=0.8),
    SamplingParams(temperature=0.9, seed=6, max_tokens=6, top_k=20, min_p=0.02),
    SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=2),
]
HELD = [
    SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.2),
    SamplingParams(
        temperature=0, max_tokens=9, structured_outputs=StructuredOutputs(choice=["abba", "baa"]),
    ),
]  # fmt: skip


FAMILIES = ("LlamaForCausalLM", "Gemma3ForCausalLM")
WORKLOADS = {"free": FREE, "held": HELD, "both": [*FREE[:3], *HELD]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`make test` tries free rows ahead in one family, and held ones in order in the other."""
    if "workload" in metafunc.fixturenames:
        grid = list(product(FAMILIES, WORKLOADS, (False, True)))
        if not metafunc.config.getoption("--everything"):
            grid = [(FAMILIES[0], "free", True), (FAMILIES[1], "held", False)]
        metafunc.parametrize(("folder", "workload", "ahead"), grid, indirect=["folder"])


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("queued") / "tiny", request.param))


def answers(folder, params, **flags):
    with manager.using(PluginManager()) as plugins:
        plugins.register("platforms", "queued", QueuedPlatform)
        with LLM(
            folder, num_gpu_blocks_override=60, max_num_batched_tokens=16, block_size=16,
            dtype="float32", **flags,
        ) as llm:  # fmt: skip
            given = [{"prompt_token_ids": prompt} for prompt in PROMPTS[: len(params)]]
            outputs = llm.generate(given, params, use_tqdm=False)
            outputs += llm.generate(given[:1], params[:1], use_tqdm=False)
    return [
        (
            o.outputs[0].token_ids,
            o.outputs[0].finish_reason,
            o.outputs[0].logprobs,
            o.prompt_logprobs,
        )
        for o in outputs
    ]


def test_the_same_tokens_as_without_a_queue(folder, workload, ahead) -> None:
    params = WORKLOADS[workload]
    # When a grammar is ready depends on time, and torch rounds by who is in a step.
    both = {"async_scheduling": ahead, "batch_invariant": params is not FREE}
    plain = {"kernels": "none", "attention_backend": "sdpa", "device": "cpu"}
    expected = answers(folder, params, **plain, **both)
    assert answers(folder, params, device="queued", **both) == expected
    assert not QueuedPlatform.work.unread
    if ahead and params is FREE:
        assert QueuedPlatform.work.ahead > 5
    if not ahead:
        assert QueuedPlatform.work.ahead == 0


def test_a_host_read_in_between_is_found() -> None:
    platform = QueuedPlatform()
    x = torch.ones(3)
    for read in (
        lambda t: t.tolist(), lambda t: t.sum().item(), lambda t: bool(t.any()),
        lambda t: t.numpy(), lambda t: t.nonzero(), lambda t: t[t > 0],
        lambda t: t.cpu(), lambda t: int(t[0]),
    ):  # fmt: skip
        with platform.queue(), pytest.raises(HostRead):
            read(x + 1)


def test_nothing_is_done_before_it_is_waited_for() -> None:
    platform = QueuedPlatform()
    x = torch.ones(3)
    with platform.queue():
        y = (x + 1)[1:]
        y += 5
        found = platform.fetch((y,))
    assert y.isnan().all()
    assert found.wait()[0].tolist() == [7, 7]


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", FAMILIES[:1], indirect=True)
def test_weights_leave_a_sleeping_device(folder):
    """At level 1 their memory on the device is released, and filled again when it wakes up."""

    def memory(model):
        return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())

    prompt = [{"prompt_token_ids": PROMPTS[0]}]
    with manager.using(PluginManager()) as plugins:
        plugins.register("platforms", "queued", QueuedPlatform)
        with LLM(
            folder,
            device="queued",
            num_gpu_blocks_override=60,
            dtype="float32",
            enable_sleep_mode=True,
        ) as llm:
            (before,) = llm.generate(prompt, FREE[0], use_tqdm=False)
            (held,) = llm.apply_model(memory)
            for tags in (["weights"], None):
                llm.sleep(1)
                assert llm.apply_model(memory) == [0]
                llm.wake_up(tags)
                assert llm.apply_model(memory) == [held]
                llm.wake_up()
                (after,) = llm.generate(prompt, FREE[0], use_tqdm=False)
                assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert held
