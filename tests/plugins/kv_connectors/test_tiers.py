"""Blocks that come back from host memory and files: tokens and log probabilities are the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from samples import parametrize_sample
from tests.media.checkpoint import write_llava

from modulm import LLM, LoRARequest, SamplingParams
from modulm.cli.main import main
from modulm.errors import ConfigError
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm.testing.engines import check_empty
from modulm_kv_transfer.block_files import VERSION
from modulm_server.engine.metrics import Metrics
from modulm_towers.testing import images
from modulm_weights_shared_memory import SharedWeights

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 128,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 64,
    "cpu_threads": 1,
}
PROMPTS = [{"prompt_token_ids": [5 + i, 9, 40, 7] * 12} for i in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
#: Tokens of a prompt's full blocks but the last token's.
STORED = 32

#: Blocks of 16 tokens and states after each 64: the unit of transfers is 64 tokens.
STATES = {"mamba_cache_mode": "all", "mamba_block_size": 64, "max_num_batched_tokens": 128}
LONG = [{"prompt_token_ids": [5 + i, 9, 40, 7] * 36} for i in range(2)]
HYBRIDS = {
    "mamba2": "Mamba2ForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "qwen3-next": "Qwen3NextForCausalLM",
    "mamba": "MambaForCausalLM",
    "jamba": "JambaForCausalLM",
    "bamba": "BambaForCausalLM",
}
FAMILIES = {
    "dense": ("Qwen3ForCausalLM", {}),
    "sliding": ("MistralForCausalLM", {"sliding_window": 24}),
    "mixed": ("Gemma3ForCausalLM", {}),
    "latent": ("DeepseekV3ForCausalLM", {}),
}


def host(_: Path) -> dict[str, Any]:
    return {"kv_offloading_size": 0.01}


def disk(folder: Path) -> dict[str, Any]:
    options = {"shared_storage_path": str(folder)}
    return {
        "kv_transfer_config": {
            "kv_connector": "ExampleConnector", "kv_connector_extra_config": options,
        },
    }  # fmt: skip


def multi(folder: Path, *names: str) -> dict[str, Any]:
    """Several tiers; by default a small one in host memory before files."""
    options = {"host": {"cpu_bytes_to_use": 1 << 20}, "disk": {"shared_storage_path": str(folder)}}
    connectors = [
        {"kv_connector": name, "kv_connector_extra_config": options.get(name, {})}
        for name in names or ("host", "disk")
    ]
    extra = {"connectors": connectors}
    return {
        "kv_transfer_config": {
            "kv_connector": "MultiConnector", "kv_connector_extra_config": extra,
        },
    }  # fmt: skip


TIERS = {"host": host, "disk": disk}
EXHAUSTIVE = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def model(family: str) -> str:
        if family not in made:
            architecture, config = FAMILIES[family]
            made[family] = str(make_tiny(tmp_path_factory.mktemp(family), architecture, **config))
        return made[family]

    return model


def drain(llm: LLM) -> None:
    """Go on until everything beside the outputs has ended too."""
    drain_transfers(llm)
    check_empty(llm._core.loop)


def drain_transfers(llm: LLM) -> None:
    while llm._core.loop.tick():
        pass


def generate(llm: LLM, prompts: Any = PROMPTS) -> tuple[list[Any], list[int | None]]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    drain(llm)
    answers = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
    return answers, [output.num_cached_tokens for output in outputs]


@parametrize_sample(("family", "tier"), [(f, t) for f in FAMILIES for t in TIERS], every=5)
def test_answers_are_the_same(
    family: str, tier: str, model: Callable[[str], str], tmp_path: Path
) -> None:
    with LLM(model(family), **FLAGS) as llm:
        expected, _ = generate(llm)
    with LLM(model(family), **FLAGS, **TIERS[tier](tmp_path)) as llm:
        assert generate(llm) == (expected, [0] * 4)
        metrics = Metrics("m")
        llm.count_by(metrics)
        llm.reset_prefix_cache()
        assert generate(llm) == (expected, [STORED] * 4)
    counts = {s.name: s.value for family in metrics.collect() for s in family.samples}
    assert counts["modulm:external_prefix_cache_hits_total"] == 4 * STORED
    assert counts["modulm:external_prefix_cache_queries_total"] >= 4 * STORED
    by_source = {
        (s.name.removeprefix("modulm:"), s.labels["source"]): s.value
        for family in metrics.collect() for s in family.samples if s.labels.get("source")
    }  # fmt: skip
    prompts = sum(len(prompt["prompt_token_ids"]) for prompt in PROMPTS)
    assert by_source["prompt_tokens_by_source_total", "external_kv_transfer"] == 4 * STORED
    assert by_source["prompt_tokens_cached_by_source_total", tier] == 4 * STORED
    assert by_source["prompt_tokens_by_source_total", "local_compute"] == prompts - 4 * STORED
    assert counts["modulm:kv_offload_load_blocks_total"] > 0
    assert counts["modulm:kv_offload_load_time_total"] > 0
    assert counts["modulm:kv_offload_load_failures_total"] == 0


@parametrize_sample(("family", "tier"), [(f, t) for f in HYBRIDS for t in TIERS], every=12)
def test_states_come_back(
    family: str, tier: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """States of recurrent layers, beside attention with smaller blocks; failed loads too."""
    model = str(make_tiny(tmp_path_factory.mktemp(family), HYBRIDS[family]))
    flags = FLAGS | STATES | {"max_model_len": 256}
    with LLM(model, **flags) as llm:
        expected, _ = generate(llm, LONG)
    with LLM(model, **flags, **TIERS[tier](tmp_path)) as llm:
        assert generate(llm, LONG) == (expected, [0] * 2)
        llm.reset_prefix_cache()
        assert generate(llm, LONG) == (expected, [128] * 2)
        for file in tmp_path.rglob("*.kv"):
            file.write_bytes(b"")
        llm.reset_prefix_cache()
        assert generate(llm, LONG) == (expected, [0 if tier == "disk" else 128] * 2)


@parametrize_sample("tier", TIERS, every=2)
def test_with_two_ranks(tier: str, model: Callable[[str], str], tmp_path: Path) -> None:
    flags = FLAGS | {"tensor_parallel_size": 2}
    with LLM(model("dense"), **flags, **TIERS[tier](tmp_path)) as llm:
        expected, _ = generate(llm)
        llm.reset_prefix_cache()
        assert generate(llm) == (expected, [STORED] * 4)


@parametrize_sample("cache", ["fp8", "int8"], every=2)
def test_caches_of_one_byte(cache: str, model: Callable[[str], str], tmp_path: Path) -> None:
    flags = FLAGS | {"kv_cache_dtype": cache}
    with LLM(model("dense"), **flags, **disk(tmp_path)) as llm:
        expected, _ = generate(llm)
        llm.reset_prefix_cache()
        assert generate(llm) == (expected, [STORED] * 4)


def test_files_outlive_the_engine(model: Callable[[str], str], tmp_path: Path) -> None:
    flags = FLAGS | disk(tmp_path)
    with LLM(model("dense"), **flags) as llm:
        expected, _ = generate(llm)
    with LLM(model("dense"), **flags) as llm:
        assert generate(llm) == (expected, [STORED] * 4)
    with LLM(model("dense"), **flags | {"seed": 7}) as llm:
        assert generate(llm)[1] == [0] * 4


@pytest.mark.parametrize("tier", [pytest.param("host"), pytest.param("disk", marks=EXHAUSTIVE)])
def test_blocks_of_older_weights_are_not_found(
    tier: str, model: Callable[[str], str], tmp_path: Path
) -> None:
    """Neither in the prefix cache nor in the tier, nor by engines with the checkpoint's weights."""
    old, new = model("dense"), make_tiny(tmp_path / "new", "Qwen3ForCausalLM", seed=2)
    flags = FLAGS | TIERS[tier](tmp_path / "blocks")
    with LLM(str(new), **FLAGS) as llm:
        expected, _ = generate(llm)
    shared = {"weight_transfer_config": {"backend": "shared_memory"}}
    with LLM(old, **flags, **shared) as llm:
        before, _ = generate(llm)
        llm.reset_prefix_cache()
        assert generate(llm) == (before, [STORED] * 4)  # by the tier
        llm.init_weight_transfer_engine()
        with SharedWeights(load_file(new / "model.safetensors")) as tensors:
            llm.start_weight_update()
            llm.update_weights(tensors.info)
            llm.finish_weight_update()
        assert generate(llm) == (expected, [0] * 4)
        llm.reset_prefix_cache()
        assert generate(llm) == (expected, [STORED] * 4)
    with LLM(old, **flags) as llm:
        assert generate(llm) == (before, [STORED if tier == "disk" else 0] * 4)


@pytest.mark.parametrize("tier", [pytest.param("host"), pytest.param("disk", marks=EXHAUSTIVE)])
def test_blocks_are_saved_when_they_will_be_evicted(
    tier: str, model: Callable[[str], str], tmp_path: Path
) -> None:
    flags = FLAGS | {"num_gpu_blocks_override": 13}
    pressure = [{"prompt_token_ids": [60 + i, 3, 8] * 16} for i in range(16)]
    with LLM(model("dense"), **flags) as llm:
        expected, _ = generate(llm)
    flags |= {"kv_offloading_policy": "evicted"}
    with LLM(model("dense"), **flags, **TIERS[tier](tmp_path)) as llm:
        saves = llm._core.loop.scheduler.planners["transfers"]
        assert generate(llm) == (expected, [0] * 4)
        assert saves._count == 0
        for prompt in pressure:
            generate(llm, [prompt])
        assert saves._count > 4
        assert generate(llm) == (expected, [STORED] * 4)
        generate(llm, [pressure[0]])
        assert generate(llm, [pressure[3]])[1] == [STORED]


#: What else takes part in steps or splits a model; each with the prompts' cached tokens.
BESIDE: dict[str, dict[str, Any]] = {
    "draft model": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
    "n-grams": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "pipeline": {"pipeline_parallel_size": 2},
    "both": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("beside", BESIDE)
def test_beside_drafts_and_stages(
    beside: str, tier: str, model: Callable[[str], str], tmp_path: Path
) -> None:
    flags = FLAGS | BESIDE[beside]
    if beside == "draft model":
        flags["speculative_config"] = flags["speculative_config"] | {"model": model("dense")}
    with LLM(model("dense"), **flags) as llm:
        expected, _ = generate(llm)
    with LLM(model("dense"), **flags, **TIERS[tier](tmp_path)) as llm:
        assert generate(llm) == (expected, [0] * 4)
        llm.reset_prefix_cache()
        assert generate(llm) == (expected, [STORED] * 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", TIERS)
def test_states_of_two_ranks(tier: str, tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path / "model", "Qwen3NextForCausalLM"))
    flags = FLAGS | STATES | {"max_model_len": 256, "tensor_parallel_size": 2}
    with LLM(folder, **flags, **TIERS[tier](tmp_path / "kv")) as llm:
        expected, _ = generate(llm, LONG)
        llm.reset_prefix_cache()
        assert generate(llm, LONG) == (expected, [128] * 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tier", "stored"), [("host", STORED), ("disk", 0)])
def test_adapters(tier: str, stored: int, tmp_path: Path) -> None:
    """Blocks of an adapter come back for it alone; a store that outlives its name has none."""
    folder = str(make_tiny(tmp_path / "model"))
    sizes = {"self_attn.q_proj": (64, 64), "mlp.down_proj": (96, 64)}
    modules = {f"model.layers.{i}.{name}": size for i in range(2) for name, size in sizes.items()}
    names = ("one", "two")
    for seed, name in enumerate(names):
        write_lora(tmp_path / name, modules, 4, seed)
    loras = [LoRARequest(name, n, tmp_path / name) for n, name in enumerate(names, 1)]
    flags = FLAGS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}

    def ask(llm: LLM, chosen: Any) -> tuple[list[Any], list[int | None]]:
        same = [PROMPTS[0]] * 3
        outputs = llm.generate(same, PARAMS, lora_request=chosen, use_tqdm=False)
        drain(llm)
        answers = [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]
        return answers, [o.num_cached_tokens for o in outputs]

    with LLM(folder, **flags) as llm:
        expected, _ = ask(llm, [*loras, None])
    assert len({tuple(tokens) for tokens, _ in expected}) == 3
    with LLM(folder, **flags, **TIERS[tier](tmp_path / "kv")) as llm:
        assert ask(llm, [*loras, None]) == (expected, [0] * 3)
        llm.reset_prefix_cache()
        assert ask(llm, [*loras, None]) == (expected, [stored, stored, STORED])


@pytest.mark.exhaustive
@pytest.mark.parametrize("tier", TIERS)
def test_images(tier: str, tmp_path: Path) -> None:
    """Blocks of an image come back for it alone."""
    folder = str(write_llava(tmp_path / "model"))
    text = "What is <image> here, and then some more words so that blocks behind it are full"
    pictures = images([(30, 30), (40, 20)])
    prompts = [{"prompt": text * 2, "multi_modal_data": {"image": [one] * 2}} for one in pictures]
    flags = {"dtype": "float32", "block_size": 16, "attention_backend": "sdpa"}
    with LLM(folder, **flags) as llm:
        expected, _ = generate(llm, prompts)
    with LLM(folder, **flags, **TIERS[tier](tmp_path / "kv")) as llm:
        generate(llm, prompts[:1])
        llm.reset_prefix_cache()
        answers, cached = generate(llm, prompts)
        # A hit changes the shapes of torch's attention, and with them the last bits.
        assert [ids for ids, _ in answers] == [ids for ids, _ in expected]
        alike, other = map(int, cached)
        assert alike > other + 16


def marked(key: str) -> SamplingParams:
    extra = {"prefix_retention": {"key": key, "marks": [[48, 60]]}}
    return SamplingParams(temperature=0, max_tokens=1, extra_args=extra)


def test_held_prefixes_outlive_pressure_and_restarts(
    model: Callable[[str], str], tmp_path: Path
) -> None:
    """Three prompts' room on the device, eight in files: a marked one stays, its neighbours go."""
    options = {"shared_storage_path": str(tmp_path), "max_bytes": 24 * 17_000}
    table = {"kv_connector": "disk", "kv_connector_extra_config": options}
    flags = FLAGS | {"num_gpu_blocks_override": 13, "kv_transfer_config": table}
    held, other, *_ = PROMPTS
    pressure = [{"prompt_token_ids": [60 + i, 3, 8] * 16} for i in range(12)]
    once = SamplingParams(temperature=0, max_tokens=1)

    def cached(llm: LLM, prompt: dict[str, Any]) -> int | None:
        (output,) = llm.generate([prompt], once, use_tqdm=False)
        drain_transfers(llm)
        return output.num_cached_tokens

    with LLM(model("dense"), **flags) as llm:
        llm.generate([held, other], [marked("a"), once], use_tqdm=False)
        for prompt in pressure:
            cached(llm, prompt)
        llm.reset_prefix_cache()
        assert cached(llm, held) == STORED
        assert cached(llm, other) == 0
    with LLM(model("dense"), **flags) as llm:
        for prompt in pressure:
            cached(llm, prompt)
        llm.reset_prefix_cache()
        assert cached(llm, held) == STORED


def test_several_tiers(model: Callable[[str], str], tmp_path: Path) -> None:
    """From host memory while it has them, else from files."""
    flags = FLAGS | multi(tmp_path)
    with LLM(model("dense"), **flags) as llm:
        expected, _ = generate(llm)
        files = sorted(tmp_path.rglob("*.kv"))
        assert files
        for file in files:
            file.write_bytes(b"")  # only host memory has the blocks
        llm.reset_prefix_cache()
        assert generate(llm) == (expected, [STORED] * 4)
        for file in files:
            file.unlink()
    with LLM(model("dense"), **flags) as llm:
        assert generate(llm) == (expected, [0] * 4)
    with LLM(model("dense"), **flags) as llm:  # only files have them
        assert generate(llm) == (expected, [STORED] * 4)


@parametrize_sample("damage", ["torn", "changed", "empty", "version"], every=2)
def test_bad_files_are_computed_and_said_once(
    damage: str, model: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = FLAGS | disk(tmp_path)
    with LLM(model("dense"), **flags) as llm:
        expected, _ = generate(llm)
    for file in tmp_path.rglob("*.kv"):
        content = file.read_bytes()
        changed = {
            "torn": content[:-100],
            "changed": content[:-1] + bytes([content[-1] ^ 1]),
            "empty": b"",
            "version": content.replace(b'"version": %d' % VERSION, b'"version": 9', 1),
        }
        file.write_bytes(changed[damage])
    with LLM(model("dense"), **flags) as llm:
        assert generate(llm) == (expected, [0] * 4)
        told = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(told) == 4
        assert all("could not be loaded and are computed" in message for message in told)
        llm.reset_prefix_cache()
        assert generate(llm) == (expected, [STORED] * 4)
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 4
    assert not [path for path in tmp_path.rglob(".*") if path.is_file()]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnector"}}, "not one of .*disk, host"),
        (
            {"kv_transfer_config": {"kv_connector": "LMCacheMPConnector"}},
            "LMCacheMPConnector is not supported: MultiConnector keeps",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "peer", "kv_buffer_device": "cuda"}},
            "kv_buffer_device is not supported: .* host memory; leave it out",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "peer", "kv_load_failure_policy": "fail"}},
            "'fail' is not supported: use recompute",
        ),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, "kv_connector"),
        ({"kv_transfer_config": {"kv_connector": "host", "kv_role": "kv_producer"}}, "kv_role"),
        ({"kv_transfer_config": {"kv_connector": "host", "port": 1}}, "port is not one of"),
        ({"kv_offloading_size": 1, "kv_transfer_config": {"kv_connector": "disk"}}, "only one"),
        ({"kv_offloading_size": 1, "prefix_caching_hash_algo": "builtin"}, "sha256"),
        ({"kv_offloading_size": 1e-9}, "too small for a block"),
        ({"kv_offloading_policy": "evicted"}, "set --kv-offloading-size"),
        (multi(Path("x"), "host", "peer"), r"connectors\[1\]: peer cannot be combined"),
        (multi(Path("x"), "host", "Redis"), "Redis' is not one of .*disk, host"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "prefix caching"),
    ],
)
def test_bad_configuration_is_refused(
    flags: dict[str, Any], words: str, model: Callable[[str], str]
) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(model("dense"), **FLAGS, **flags)


def test_models_with_states_are_refused(tmp_path: Path) -> None:
    folder = str(make_tiny(tmp_path, "MambaForCausalLM"))
    with pytest.raises(ConfigError, match="states"):
        LLM(folder, **FLAGS, kv_offloading_size=0.01)


def test_explain_names_the_connector_and_where_events_go(
    model: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = '{"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"max_bytes": 9}}'
    events = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
    for flags in (
        ["--kv-offloading-size", "1"],
        ["--kv-transfer-config", options, "--kv-events-config", events],
    ):
        with pytest.raises(SystemExit) as ended:
            main(["explain", model("dense"), *flags])
        assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("KV ")] == [
        "KV connector: host (set by --kv-offloading-size; cpu_bytes_to_use 1073741824)",
        "KV events: zmq (set by --kv-events-config; published at tcp://*:5557)",
        "KV connector: disk (set by --kv-transfer-config; max_bytes 9)",
    ]
