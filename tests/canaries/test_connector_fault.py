"""A KV connector of a package whose load fails on one of two ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import parametrize_sample

from modulm import LLM, SamplingParams
from modulm.contracts.outputs import RequestOutput
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 64,
    "cpu_threads": 1,
    "tensor_parallel_size": 2,
}
PROMPTS = [{"prompt_token_ids": [5 + i, 9, 40, 7] * 12} for i in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
#: Tokens of a prompt's full blocks but the last token's.
STORED = 32


@pytest.fixture(autouse=True)
def canary(tmp_path: Path, installed: Any) -> Iterator[None]:
    with installed("connector", tmp_path):
        yield


def generate(llm: LLM, prompts: list[Any]) -> list[RequestOutput]:
    """The outputs, once everything beside them has ended too."""
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    while llm._core.loop.tick():
        pass
    check_empty(llm._core.loop)
    return outputs


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@parametrize_sample("overlapped", [False, True], every=2)
def test_what_fails_to_load_is_computed(
    tmp_path_factory: pytest.TempPathFactory, overlapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(make_tiny(tmp_path_factory.mktemp("tiny"), "Qwen3ForCausalLM"))
    flags = FLAGS | {"async_scheduling": overlapped}
    with LLM(folder, **flags) as llm:
        expected = answers(generate(llm, PROMPTS))
    with LLM(folder, plugin_config={"kv_connectors": {"faulty": {"rank": 1}}}, **flags) as llm:
        assert answers(generate(llm, PROMPTS[:2])) == expected[:2]
        assert not caplog.records
        for cached in ([0, STORED, 0], [STORED, STORED, STORED]):
            llm.reset_prefix_cache()
            outputs = generate(llm, PROMPTS)
            assert answers(outputs) == expected
            assert [output.num_cached_tokens for output in outputs] == cached
            warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
            assert len(warnings) == 1
            assert "rank 1: the link is down" in warnings[0]
