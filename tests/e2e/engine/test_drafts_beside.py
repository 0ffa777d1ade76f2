"""The default drafts beside other features of the engine: the answers of plain decoding."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from drafted import accepted, any_counts, outcome, same_with_drafts
from safetensors.torch import load_file
from samples import parametrize_sample
from tests.e2e.engine.test_lora import write

from modulm import AsyncLLM, BeamSearchParams, LoRARequest, SamplingParams
from modulm.contracts.sampling import OutputKind
from modulm.testing.checkpoints import make_tiny
from modulm_weights_shared_memory import SharedWeights

FLAGS: dict[str, Any] = {
    "max_model_len": 128, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 60,
    "cpu_threads": 1,
}  # fmt: skip
TEXTS = [[5, 99, 7, 30], [7, 9, 11, 13] * 9, [300, 301, 302, 303, 304] * 3, [17], [8] * 21]
PROMPTS = [{"prompt_token_ids": ids} for ids in TEXTS]
GREEDY = SamplingParams(temperature=0, max_tokens=18, logprobs=2, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_tokens=16, logprobs=0, ignore_eos=True)
PARAMS = [
    GREEDY, SAMPLED.with_(n=2), GREEDY.with_(repetition_penalty=1.3, ignore_eos=False),
    SAMPLED.with_(top_k=20, top_p=0.9), GREEDY.with_(prompt_logprobs=1),
]  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3ForCausalLM", {"hidden_size": 128, "intermediate_size": 192}),
    "experts": ("MixtralForCausalLM", {}),
    "latent": ("DeepseekV3ForCausalLM", {}),
    "sliding": ("Gemma3ForCausalLM", {}),
}
MP = {"distributed_executor_backend": "mp"}
ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place: Path = tmp_path_factory.mktemp("drafts")
    for name, (architecture, config) in MODELS.items():
        make_tiny(place / name, architecture, dtype="bfloat16", **config)
    make_tiny(place / "llama")
    make_tiny(place / "other", seed=7)
    for seed, name in enumerate("abc"):
        write(place / name, seed)
    return place


@pytest.fixture(autouse=True)
def any_number_of_drafts(monkeypatch) -> None:
    any_counts(monkeypatch)


def ask(llm: Any) -> list[Any]:
    """Everything three times, so that earlier answers are drafted from."""
    asked = [llm.generate(PROMPTS, PARAMS, use_tqdm=False) for _ in range(3)]
    return [output for outputs in asked for output in outputs]


QUANTIZED = [
    ("dense", "int8", {"kv_cache_dtype": "int8"}), ("experts", "int4", {}),
    ("dense", "int4", {"quantization_config": {"activations": "bf16"}}), ("latent", "int8", {}),
    ("dense", "fp8", {"kv_cache_dtype": "fp8"}), ("sliding", None, {"kv_cache_dtype": "int8"}),
    ("dense", "mxfp4", {"kv_cache_dtype": "fp8_e5m2"}), ("experts", "mxfp8", {}),
    ("latent", "fp8_per_block", {"kv_cache_dtype": "fp8"}), ("dense", "int8", {"dtype": "float32"}),
    ("experts", "fp8_per_tensor", {"dtype": "float16"}),
]  # fmt: skip


@parametrize_sample(("model", "form", "flags"), QUANTIZED, every=6)
def test_quantized_weights_and_caches(place, model, form, flags) -> None:
    same_with_drafts(str(place / model), ask, **FLAGS, quantization=form, **flags)


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "host memory": ("dense", {"kv_offloading_size": 0.01, "num_gpu_blocks_override": 16}),
    "ahead": ("dense", {"async_scheduling": True}),
    "call by call": ("experts", {"enforce_eager": True}),
    "transformers": ("llama", {"model_impl": "transformers"}),
    "processed": ("dense", {"logprobs_mode": "processed_logprobs"}),
    "logits": ("dense", {"logprobs_mode": "raw_logits", "block_size": 32}),
    "narrow cache": ("latent", {"dtype": "float32", "kv_cache_dtype": "bfloat16"}),
    "routes": ("experts", {"enable_return_routed_experts": True}),
}


@parametrize_sample("setting", SETTINGS, every=20)
def test_settings(place, setting) -> None:
    model, flags = SETTINGS[setting]
    same_with_drafts(str(place / model), ask, **{**FLAGS, **flags})


@pytest.mark.exhaustive
def test_tiers_of_the_cache(place, tmp_path) -> None:
    tiers = {"host": {"cpu_bytes_to_use": 1 << 20}, "disk": {"shared_storage_path": str(tmp_path)}}
    connectors = [
        {"kv_connector": name, "kv_connector_extra_config": extra} for name, extra in tiers.items()
    ]
    extra = {"connectors": connectors}
    table = {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    flags = {**FLAGS, "num_gpu_blocks_override": 16, "kv_transfer_config": table}
    same_with_drafts(str(place / "dense"), ask, **flags)


#: Worker processes choose how much they verify by the times of their steps. Ranks that share
#: contexts are no case: their backend is not `batch_invariant`, so they draft only if asked to.
RANKS = [
    ("dense", {"tensor_parallel_size": 2}), ("latent", {"tensor_parallel_size": 2}),
    ("experts", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ("dense", {}),
]  # fmt: skip


@parametrize_sample(("model", "flags"), RANKS, every=10)
def test_ranks_in_processes(place, model, flags) -> None:
    same_with_drafts(str(place / model), ask, **FLAGS, **MP, **flags)


@parametrize_sample(
    "flags",
    [{}, {"dtype": "bfloat16", "quantization": "int8"}, {**MP, "tensor_parallel_size": 2}],
    every=3,
)
def test_adapters_in_one_batch(place, flags) -> None:
    adapters = [LoRARequest(name, n, place / name) for n, name in enumerate("abc", 1)]

    def ask_with_adapters(llm: Any) -> list[Any]:
        found = []
        for chosen in ([0, 0, 1, None, 2], [0, 0, 1, None, 2], [2, 1, 1, 0, None]) * 2:
            loras = [None if n is None else adapters[n] for n in chosen]
            found += llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=loras)
        return found

    same_with_drafts(str(place / "llama"), ask_with_adapters, **FLAGS, **ADAPTERS, **flags)


def test_sleep_beams_and_new_weights_between_answers(place) -> None:
    """What was drafted from earlier answers stays; what it was said with is other weights."""
    beams: list[list[Any]] = []
    weights = load_file(place / "other" / "model.safetensors")

    def ask_between(llm: Any) -> list[Any]:
        found = ask(llm)
        llm.sleep(1)
        llm.wake_up()
        searches = llm.beam_search(PROMPTS[:2], BeamSearchParams(3, 10))
        sequences = [each for search in searches for each in search.sequences]
        beams.append([(each.tokens, each.cum_logprob, each.text) for each in sequences])
        found += ask(llm)
        llm.init_weight_transfer_engine()
        with SharedWeights(weights) as shared:
            llm.start_weight_update()
            llm.update_weights(shared.info)
            llm.finish_weight_update()
        return found + ask(llm)

    more = {"enable_sleep_mode": True, "weight_transfer_config": {"backend": "shared_memory"}}
    same_with_drafts(str(place / "llama"), ask_between, **FLAGS, **more)
    assert beams[0] == beams[1]


@pytest.mark.exhaustive
def test_replicas(place) -> None:
    """Each replica drafts from the answers that it gave."""

    async def ask_all(llm: AsyncLLM) -> list[Any]:
        async def one(index: int, again: int) -> Any:
            params = PARAMS[index].with_(output_kind=OutputKind.FINAL_ONLY)
            async for output in llm.generate(PROMPTS[index], params, f"{index} {again}"):
                last = output
            return last

        found = []
        for again in range(4):
            found += await asyncio.gather(*(one(index, again) for index in range(len(PROMPTS))))
        return found

    answers = []
    for speculative in ("off", "auto"):
        flags = {**FLAGS, "data_parallel_size": 2, "speculative": speculative}
        llm = AsyncLLM(str(place / "dense"), **flags)
        try:
            answers.append(asyncio.run(ask_all(llm)))
        finally:
            llm.shutdown()
    assert [outcome(each) for each in answers[0]] == [outcome(each) for each in answers[1]]
    assert accepted(answers[1])
