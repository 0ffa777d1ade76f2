"""Caches in fewer bits than the model's: the text stays sensible, blocks shrink, the rest is
refused by name."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.errors import UnsupportedError
from modulm.loading import load_model, open_checkpoint
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny

needs_kernels = pytest.mark.skipif(
    find_spec("modulm_kernels_cpu") is None,
    reason="no compiled CPU kernels: make setup says why",
)
#: Questions as the model knows them: where it is sure, rounding moves no choice.
PROMPTS = [
    f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for asked in ("What is the capital of France?", "Why is the sky blue?")
]


def answers(**flags):
    """Per prompt: the tokens that the demo model takes greedily, and their log probabilities."""
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
    options = {"kv_cache_memory_bytes": 1 << 24, "max_model_len": 128, "cpu_threads": 1} | flags
    with LLM("demo", **options) as llm:
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            done = output.outputs[0]
            chosen = zip(done.token_ids, done.logprobs, strict=True)
            yield done.token_ids, [found[token].logprob for token, found in chosen]


@needs_kernels
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "fp8_e5m2"])
def test_text_is_that_of_the_full_cache(kv_cache_dtype):
    for full, narrow in zip(answers(), answers(kv_cache_dtype=kv_cache_dtype), strict=True):
        alike = next((i for i in range(8) if full[0][i] != narrow[0][i]), 8)
        assert alike >= 4
        # The 2 bits of e5m2 round keys and values by up to an eighth.
        bound = 0.2 if kv_cache_dtype == "fp8_e5m2" else 0.1
        assert narrow[1][:alike] == pytest.approx(full[1][:alike], abs=bound)


def load(folder, **flags):
    settings = {"dtype": "bfloat16", "max_model_len": 64, "cpu_threads": 1, **flags}
    config = EngineConfig.from_keywords(model=str(folder), **settings)
    plugins = manager.current()
    platform = plugins.load("platforms", "cpu")()
    return load_model(config, open_checkpoint(config, plugins), platform, plugins)


@needs_kernels
def test_blocks_are_smaller(tmp_path):
    make_tiny(tmp_path, "LlamaForCausalLM")
    kept = ("auto", "int8", "fp8_e4m3", "fp8_e5m2")
    size = {name: load(tmp_path, kv_cache_dtype=name).groups[0].block_bytes for name in kept}
    assert size["fp8_e4m3"] == size["fp8_e5m2"] == size["auto"] // 2
    assert size["fp8_e4m3"] < size["int8"] < size["auto"]


@needs_kernels
def test_kernels_that_are_switched_off_are_not_used(tmp_path):
    make_tiny(tmp_path, "LlamaForCausalLM")
    chosen = {}
    for kernels in (None, ["none"]):
        loaded = load(tmp_path, kernels=kernels)
        decision = next(d for d in loaded.decisions if d.subject.startswith("attention"))
        said = {verdict.name: verdict.reason for verdict in decision.candidates}
        chosen[kernels is None] = decision.winner, said["cpu_paged"]
    assert chosen[True] == ("cpu_paged", None)
    assert chosen[False] == ("sdpa", "needs the kernels of cpu, but this model does not use them")


@pytest.mark.parametrize("flags", [
    {"kv_cache_dtype": "fp8_inc"},
    {"kv_cache_dtype": "int4_per_token_head", "attention_backend": "cpu_paged"},
], ids=str)  # fmt: skip
def test_what_no_backend_keeps_is_refused(flags):
    with pytest.raises(UnsupportedError, match="^kv_cache_dtype: "):
        LLM("demo", **flags)


@needs_kernels
def test_a_latent_in_int8_is_refused(tmp_path):
    make_tiny(tmp_path, "DeepseekV3ForCausalLM")
    with pytest.raises(UnsupportedError, match="does not support a latent .MLA. cache or"):
        LLM(str(tmp_path), kv_cache_dtype="int8")
