"""Experts that are held more than once and move between ranks, in real processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import FileStore

from modulm import LLM, SamplingParams
from modulm.contracts.quantization import Shard
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny
from modulm_distributed.balance import BalancedExperts
from modulm_distributed.collectives import Members
from modulm_distributed.eplb import EplbConfig
from modulm_distributed.torch_group import Gloo
from modulm_server.engine.metrics import Metrics

PROMPTS = [{"prompt_token_ids": [5, 9, 40 + i] * (7 - 3 * i)} for i in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
FLAGS = {
    "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 64, "block_size": 16, "use_tqdm_on_load": False,
}  # fmt: skip
RANKS = {
    "distributed_executor_backend": "pool", "tensor_parallel_size": 2,
    "enable_expert_parallel": True,
}  # fmt: skip
OFTEN = {"window_size": 4, "step_interval": 3, "num_redundant_experts": 2}


def answers(folder, counted=None, **flags):
    with LLM(str(folder), **{**FLAGS, "dtype": "float32"} | flags) as llm:
        if counted is not None:
            llm.count_by(counted)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    answered = [output.outputs[0] for output in outputs]
    return [
        (list(a.token_ids), [{t: one.logprob for t, one in at.items()} for at in a.logprobs])
        for a in answered
    ]


def check_close(found, expected):
    for (tokens, positions), (wanted, others) in zip(found, expected, strict=True):
        assert tokens == wanted
        for here, there in zip(positions, others, strict=True):
            assert here == pytest.approx(there, abs=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model") / "mixture", "MixtralForCausalLM")


def test_answers_are_those_of_one_rank(plugins, folder):
    """Also when experts have moved; and each choice of a token is counted once."""
    counted = Metrics("m")
    moving = {"enable_eplb": True, "eplb_config": OFTEN}
    found = answers(folder, counted, **RANKS, **moving)
    check_close(found, answers(folder))
    values = {
        (sample.name, sample.labels.get("expert")): sample.value
        for family in counted.collect()
        for sample in family.samples
    }
    chosen = [values["modulm:expert_tokens_total", str(expert)] for expert in range(4)]
    layers, each = 3, 2
    assert all(chosen)
    assert sum(chosen) == values["modulm:iteration_tokens_total_sum", None] * layers * each


def test_codes_and_scales_move(plugins, folder):
    moving = {"enable_eplb": True, "eplb_config": OFTEN, "quantization": "int4"}
    check_close(answers(folder, **RANKS, **moving), answers(folder, **RANKS, quantization="int4"))


def test_biases_move_with_their_experts(plugins, tmp_path):
    folder = make_tiny(tmp_path / "model", "GptOssForCausalLM")
    moving = {"enable_eplb": True, "eplb_config": OFTEN}
    check_close(answers(folder, **RANKS, **moving), answers(folder))


@pytest.mark.parametrize(("flags", "message"), [
    ({"enable_eplb": True}, "enable_eplb: .*--enable-expert-parallel"),
    ({"eplb_config": {"window_size": 3}}, "eplb_config: has no effect without --enable-eplb"),
    ({"enable_eplb": True, "eplb_config": {"widow": 3}}, "eplb_config: .*widow.*window_size"),
    ({"enable_eplb": True, "eplb_config": {"step_interval": 0}}, "step_interval.*>= 1"),
    ({"enable_eplb": True, "eplb_config": {"step_interval": "x"}}, "step_interval"),
    (
        {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 3},
         "tensor_parallel_size": 2, "enable_expert_parallel": True},
        "num_redundant_experts: 3 .* 2 ranks",
    ),
    ({"enable_eplb": True, "enable_expert_parallel": True, "data_parallel_size": 2,
      "data_parallel_group": "folder"}, "enable_eplb: with experts of several replicas"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_loaded(folder, flags, message):
    with pytest.raises(ConfigError, match=message):
        answers(folder, **flags)


def test_weights_go_where_the_placement_says(tmp_path):
    """Four ranks, of which one has what half of the tokens choose: then all have a copy of it. What
    the ranks add up to is the same before and after.
    """
    experts, width, ranks = 8, 6, 4
    weight = torch.randn(experts, width, width, generator=torch.Generator().manual_seed(0))
    x = torch.arange(56 * width).view(56, width) / 100
    ids = torch.cat([torch.zeros(28), torch.arange(28) % 7 + 1]).long()[:, None]
    expected = torch.einsum("tio,ti->to", weight[ids[:, 0]], x)

    def fused(x, weights, ids, stack, **biases):
        return torch.einsum("tio,ti->to", stack[ids[:, 0]], x) * weights

    def rank(number):
        config = EplbConfig(window_size=2, step_interval=2, num_redundant_experts=4)
        members = Members("experts", number, ranks, FileStore(str(tmp_path / "store"), ranks))
        group = Gloo.open(SimpleNamespace(device=torch.device("cpu")), members)
        balanced = BalancedExperts(group, config)
        stack = weight[2 * number : 2 * number + 2].clone()
        layer = balanced.layer(fused, Shard(2 * number, 2, experts), "layer")
        no_biases = {"gate_up_bias": None, "down_bias": None}
        sums, here = [], []
        for _ in range(5):
            sums.append(layer(x, torch.ones(56, 1), ids, stack, **no_biases))
            here.append(sums[-1].abs().sum(1).count_nonzero().item())
        return sums, here, stack, balanced.report()

    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(rank, range(ranks)))
    for step in range(5):
        torch.testing.assert_close(sum(sums[step] for sums, *_ in found), expected)
    busiest = [max(here[step] for _, here, *_ in found) for step in range(5)]
    assert busiest[0] == busiest[2]
    assert busiest[3] == busiest[4] < 0.8 * busiest[0], busiest
    for _, _, stack, routed in found:
        assert any(torch.equal(one, weight[0]) for one in stack)
        assert routed.tolist() == [4 * 28, *[4 * 4] * 7]
