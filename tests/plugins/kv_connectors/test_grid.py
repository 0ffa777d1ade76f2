"""Tokens and log probabilities are the same with each tier: over kinds of caches, and what else
takes part in steps. `make test` runs a few cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from samples import parametrize_sample
from tests.media.checkpoint import write_llava
from tests.plugins.kv_connectors.test_peer import PREFILL, free_port
from tests.plugins.kv_connectors.test_tiers import disk, drain, host, multi
from tests.plugins.models.test_keys import ARCHITECTURES

from modulm import LLM, LoRARequest, SamplingParams
from modulm.contracts.model import Model
from modulm.engine.scheduling.scheduler import BudgetScheduler
from modulm.errors import ConfigError
from modulm.plugins import manager
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm_towers.testing import images

FLAGS: dict[str, Any] = {
    "dtype": "float32", "block_size": 32, "max_model_len": 192, "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 48, "cpu_threads": 1,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)
PROMPTS = [{"prompt_token_ids": [5 + i, 9, 40, 7] * 39} for i in range(3)]
#: Recurrent states after each 64 tokens: the unit of transfers.
STATES = {"mamba_cache_mode": "all", "mamba_block_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("Qwen3ForCausalLM", {}),
    "experts": ("Qwen3MoeForCausalLM", {}),
    "sliding": ("MistralForCausalLM", {"sliding_window": 24}),
    "full and sliding": ("Gemma3ForCausalLM", {}),
    "latent": ("DeepseekV3ForCausalLM", {}),
    "states": ("Mamba2ForCausalLM", {}),
    "states and full": ("Qwen3NextForCausalLM", {}),
    "states beside full": ("FalconH1ForCausalLM", {}),
}
STATEFUL = {name for name in FAMILIES if "states" in name}
BESIDE: dict[str, dict[str, Any]] = {
    "alone": {},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    # Two prompts fit, but not their answers.
    "preemption": {"num_gpu_blocks_override": 12},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "adapter": {"enable_lora": True, "max_lora_rank": 8},
    "two ranks": {"tensor_parallel_size": 2},
}


def peer(_: Path) -> dict[str, Any]:
    """An engine that fetches from itself."""
    extra = {"cpu_bytes_to_use": 1 << 24}
    table = {"kv_connector": "peer", "kv_port": free_port(), "kv_connector_extra_config": extra}
    return {"kv_transfer_config": table}


TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "host": host, "disk": disk, "multi": multi, "peer": peer,
}  # fmt: skip
#: Adapters' names mean nothing in files and in other engines.
NO_ADAPTERS = {"disk", "multi", "peer"}
#: (family, beside) that the engine refuses without a tier, too.
REFUSED: Mapping[tuple[str, str], str] = {
    ("latent", "int8 cache"): "does not support a latent",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def made(family: str) -> Path:
        if family not in folders:
            architecture, config = FAMILIES[family]
            folders[family] = make_tiny(tmp_path_factory.mktemp("grid"), architecture, **config)
        return folders[family]

    return made


def adapter(folder: Path, into: Path) -> LoRARequest:
    """An adapter of the last linear layer of each branch that has one."""
    (file,) = folder.glob("*.safetensors")
    modules = {}
    with safe_open(str(file), "pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            module = name.removesuffix(".weight")
            if module.endswith(("self_attn.o_proj", "mlp.down_proj", "mixer.out_proj")):
                out, inputs = opened.get_slice(name).get_shape()
                modules[module] = (inputs, out)
    return LoRARequest("one", 1, write_lora(into / "one", modules, 4, 0))


def ask(
    llm: LLM, prompts: list[Any], lora: LoRARequest | None, params: Any = PARAMS
) -> tuple[list[Any], list[int], list[Any]]:
    outputs = llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
    drain(llm)
    return (
        [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs],
        [output.num_cached_tokens or 0 for output in outputs],
        [output.kv_transfer_params for output in outputs],
    )


def twice(
    llm: LLM, tier: str, prompts: list[Any], lora: LoRARequest | None = None
) -> tuple[list[Any], list[Any], list[int]]:
    """Generate, forget what is on the device, and generate again: the answers of both, and how many
    tokens were loaded.
    """
    if tier != "peer":
        first, _, _ = ask(llm, prompts, lora)
        llm.reset_prefix_cache()
        return (first, *ask(llm, prompts, lora)[:2])
    send = PARAMS.with_(max_tokens=1, extra_args={"kv_transfer_params": PREFILL})
    _, _, places = ask(llm, prompts, lora, send)
    llm.reset_prefix_cache()
    fetch = [PARAMS.with_(extra_args={"kv_transfer_params": place or {}}) for place in places]
    second, cached, _ = ask(llm, prompts, lora, fetch)
    llm.reset_prefix_cache()
    return ask(llm, prompts, lora)[0], second, cached


def check(
    folder: Path, tier: str, into: Path, lora: LoRARequest | None = None, **flags: Any
) -> list[int]:
    """Check that a tier changes no answer; return how many tokens of each prompt were loaded."""
    with LLM(str(folder), **flags) as llm:
        expected = ask(llm, PROMPTS, lora)[0]
    with LLM(str(folder), **flags, **TIERS[tier](into)) as llm:
        first, second, cached = twice(llm, tier, PROMPTS, lora)
    assert first == expected
    assert second == expected
    return cached


#: Not preempted, since there is always room: states have a slot for every sequence, and windows let
#: go of blocks.
ROOMY = {("states", "preemption"), ("sliding", "preemption")}
CELLS = [cell for cell in product(FAMILIES, BESIDE, TIERS) if cell[:2] not in ROOMY]


@parametrize_sample(("family", "beside", "tier"), CELLS, every=75)
def test_answers_are_those_without_a_tier(
    family: str,
    beside: str,
    tier: str,
    made: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = FLAGS | (STATES if family in STATEFUL else {}) | BESIDE[beside]
    preempted: list[int] = []
    preempt = BudgetScheduler._preempt
    monkeypatch.setattr(
        BudgetScheduler, "_preempt", lambda *args: (preempted.append(1), preempt(*args))[1]
    )
    if (family, beside) in REFUSED:
        with pytest.raises(Exception, match=REFUSED[family, beside]):
            LLM(str(made(family)), **flags)
        return
    lora = adapter(made(family), tmp_path) if beside == "adapter" else None
    cached = check(made(family), tier, tmp_path, lora, **flags)
    assert bool(preempted) == (beside == "preemption")
    if beside == "adapter" and tier in NO_ADAPTERS:
        assert cached == [0] * 3
    elif beside == "preemption":
        assert sum(cached) >= 128
    else:
        assert cached == [128] * 3


#: Heads of a multiple of 16, which NVFP4 needs; and latents of the sizes of DeepSeek's formats,
#: with an indexer beside them, too.
EVEN = {"head_dim": 32}
WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
FAMILIES |= {
    "even": ("Qwen3ForCausalLM", EVEN),
    "even, sliding": ("MistralForCausalLM", EVEN | {"sliding_window": 24}),
    "even, full and sliding": ("Gemma3ForCausalLM", EVEN),
    "wide latent": ("DeepseekV3ForCausalLM", WIDE),
    "wide latent, selected": ("DeepseekV32ForCausalLM", WIDE | {"index_head_dim": 128}),
}
#: Formats of caches besides those of the grid above, by family.
FORMATS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("even", "even, sliding", "even, full and sliding", "states and full"),
        ("nvfp4", "nvfp4_4over6", "fp8_per_token_head", "fp8_e5m2", "int4_per_token_head"),
    ),
    "latent": ("fp8_e5m2",),
    "wide latent": ("fp8_ds_mla", "nvfp4_ds_mla"),
    "wide latent, selected": ("fp8_ds_mla", "nvfp4_ds_mla"),
}
FORMAT_CELLS = [
    (family, name, tier) for family, names in FORMATS.items() for name in names for tier in TIERS
]


@parametrize_sample(("family", "dtype", "tier"), FORMAT_CELLS, every=len(FORMAT_CELLS))
def test_caches_in_each_format(
    family: str, dtype: str, tier: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """One prompt at a time, and hits against hits: the last bits of torch's attention depend on
    what else is in a step.
    """
    flags = FLAGS | (STATES if family in STATEFUL else {}) | {"kv_cache_dtype": dtype}
    folder = str(made(family))
    with LLM(folder, **flags) as llm:
        computed = [ask(llm, [prompt], None)[0] for prompt in PROMPTS]
        hits = [ask(llm, [prompt], None)[:2] for prompt in PROMPTS]
    assert [cached for _, cached in hits] == [[128]] * 3
    with LLM(folder, **flags, **TIERS[tier](tmp_path)) as llm:
        for prompt, first, (second, _) in zip(PROMPTS, computed, hits, strict=True):
            assert twice(llm, tier, [prompt]) == (first, second, [128])


@parametrize_sample("tier", [t for t in TIERS if t != "host"], every=3)
def test_scales_of_one_engine_stay_in_it(
    tier: str, made: Callable[[str], Path], tmp_path: Path
) -> None:
    flags = FLAGS | {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    with pytest.raises(ConfigError, match=f"calculate_kv_scales.*{tier} shares blocks"):
        LLM(str(made("full")), **flags, **TIERS[tier](tmp_path))


@pytest.mark.exhaustive
def test_scales_of_one_engine_come_back_from_its_memory(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    flags = FLAGS | {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    assert check(made("full"), "host", tmp_path, **flags) == [128] * 3


@pytest.mark.parametrize("tier", [pytest.param(t, marks=pytest.mark.exhaustive) for t in TIERS])
def test_images(tier: str, tmp_path: Path) -> None:
    folder = write_llava(tmp_path / "model")
    text = "What is <image> here, and then some more words so that blocks behind it are full"
    pictures = images([(30, 30), (40, 20)])
    prompts = [{"prompt": text * 2, "multi_modal_data": {"image": [one] * 2}} for one in pictures]
    flags = {"dtype": "float32", "block_size": 16, "cpu_threads": 1}
    with LLM(str(folder), **flags) as llm:
        expected = ask(llm, prompts, None)[0]
    with LLM(str(folder), **flags, **TIERS[tier](tmp_path / "kv")) as llm:
        first, second, cached = twice(llm, tier, prompts)
    assert first == expected
    assert second == expected
    assert min(cached) > 16


def generates(architecture: str) -> bool:
    driver: type[Model] = manager.current().load("models", architecture)
    return "generate" in driver.tasks


def check_equal(found: list[Any], expected: list[Any], bound: float) -> None:
    """The same tokens, and log probabilities that differ by at most `bound`."""
    for (tokens, steps), (others, other_steps) in zip(found, expected, strict=True):
        assert tokens == others
        for step, other in zip(steps, other_steps, strict=True):
            values = {token: entry.logprob for token, entry in other.items()}
            assert {t: e.logprob for t, e in step.items()} == pytest.approx(
                values, abs=bound, rel=0
            )


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_families(architecture: str, tmp_path: Path) -> None:
    """Every family that generates text, from host memory and from another engine."""
    if not generates(architecture):
        pytest.skip("generates no text")
    folder = make_tiny(tmp_path / "model", architecture)
    with LLM(str(folder), **FLAGS, **STATES) as llm:
        groups = llm._core.loop.executor._worker.capacity.groups
        expected = ask(llm, PROMPTS, None)[0]
        llm.reset_prefix_cache()
        alone = [ask(llm, [prompt], None)[0][0] for prompt in PROMPTS]
    # The last bits of some (Kimi Linear, Ring 2.5) depend on what else is in a step.
    bound = 0.0 if alone == expected else 1e-5
    crossed = any(group.kind == "cross" for group in groups)
    for tier in ("host", "peer"):
        flags = FLAGS | STATES | TIERS[tier](tmp_path)
        if crossed:
            with pytest.raises(ConfigError, match="encoder-decoder"):
                LLM(str(folder), **flags)
            continue
        with LLM(str(folder), **flags) as llm:
            first, second, cached = twice(llm, tier, PROMPTS)
        check_equal(first, expected, bound)
        check_equal(second, expected, bound)
        assert cached == [128] * 3
