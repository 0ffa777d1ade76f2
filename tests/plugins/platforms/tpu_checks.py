"""The TPU platform over JAX's CPU: the tokens and logits of the CPU platform, in few programs."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.media.checkpoint import write_llava
from tests.support.samples import parametrize_sample

import modulm_attention_pallas
import modulm_kernels_pallas
import modulm_platform_tpu
from modulm import LLM, LoRARequest, SamplingParams
from modulm.contracts.attention import AttentionSpec
from modulm.contracts.model import CacheSpec
from modulm.contracts.platform import StepSizes
from modulm.contracts.state import StateSpec
from modulm.errors import ConfigError, ModulmError
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm_platform_tpu.devices import chip_memory, chips_of
from modulm_platform_tpu.hooks import REFUSED
from modulm_platform_tpu.sizes import sizes_of, steps_of
from modulm_towers.testing import images

pytestmark = pytest.mark.skipif(
    find_spec("jax") is None or find_spec("torchax") is None,
    reason="JAX is not installed; make setup installs it",
)

ROOT = Path(__file__).resolve().parents[3]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 24,
    "block_size": 16,
    "num_gpu_blocks_override": 24,
    "logprobs_mode": "raw_logits",
    "disable_frontend_multiprocessing": True,
}
SIZES = {"rows": [4], "tokens": [28]}
PROMPTS = [[5, 99, 7, 30], [17], [7, 9, 11, 13] * 9, [3, 4, 5]]
GREEDY = [
    SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=logprobs)
    for count, logprobs in ((9, 4), (14, None), (3, 4), (6, None))
]
#: Steps whose logits are read on the host, with the code of the CPU platform.
ON_HOST = [
    SamplingParams(temperature=0.9, seed=4, top_k=20, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.7, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0, logit_bias={9: 50.0}, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1, seed=2, top_p=0.8, max_tokens=6, ignore_eos=True),
]
FAMILIES = [
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "MambaForCausalLM",
    "Mamba2ForCausalLM",
    "Qwen3NextForCausalLM",
    "FalconH1ForCausalLM",
    "Lfm2ForCausalLM",
]


#: Kinds of layers of the attention kit; compiling takes half a second for each of their steps.
ATTENTION = ("sinks and window", "latent")


@pytest.fixture(autouse=True, scope="module")
def _jax_on_processors() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
        yield


def answers(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def compare(expected: list[Any], got: list[Any]) -> None:
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    for mine, theirs in zip(got, expected, strict=True):
        for ours, other in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert ours.keys() == other.keys()
            for token, entry in ours.items():
                assert abs(entry.logprob - other[token].logprob) < 1e-3


class PartCounts:
    """Sums what step parts count, as the metrics of a server do."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def parts(self, counts: Mapping[str, float]) -> None:
        self.counts.update(counts)

    def step(self, stats: Any) -> None: ...
    def gaps(self, seconds: Any) -> None: ...
    def finished(self, request: Any) -> None: ...


@parametrize_sample("architecture", FAMILIES, 13)
def test_tokens_and_logits_equal_those_of_the_cpu(architecture, tmp_path) -> None:
    from modulm_platform_tpu.compilations import COMPILATIONS

    folder = str(make_tiny(tmp_path, architecture))
    with LLM(folder, device="cpu", **SETTINGS) as llm:
        expected, others = answers(llm, GREEDY), answers(llm, ON_HOST)
    before = COMPILATIONS.count
    statistics = PartCounts()
    with LLM(folder, device="tpu", additional_config=SIZES, **SETTINGS) as llm:
        started = COMPILATIONS.count
        told = llm._core.info.parts["compilations"]["counts"]
        llm.count_by(statistics)
        compare(expected, answers(llm, GREEDY))
        compare(others, answers(llm, ON_HOST))
    # Metrics begin with the counts of the start; loading the model is before it.
    assert 0 < told["compilations"] <= started - before
    assert told["compile_time"] > 0
    assert not statistics.counts["compilations"]
    # For two sizes of steps: a forward pass, a gather and the caches' conversion each; a head, an
    # argmax, zeros of the caches, and constants of the model that are computed while tracing.
    assert started - before <= 2 * 3 + 3 + 25
    assert COMPILATIONS.count == started, "all programs are compiled at start"


def test_sizes() -> None:
    sizes = sizes_of(3, 24, rows=[4], tokens=[28])
    assert sizes == StepSizes(rows=(4,), tokens=(4, 28), samples=(4, 28))
    for rows in range(1, 4):
        for tokens in range(rows, 25):
            padding = sizes.padding(rows, tokens)
            assert rows + len(padding) == 4
            assert tokens + sum(padding) in sizes.tokens
    assert [(len(step), int(step.sum())) for step in steps_of(sizes)] == [(4, 28), (4, 4)]
    assert sizes_of(64, 1024).rows == (8, 32, 65)
    with pytest.raises(ConfigError, match=r"platforms\.tpu\.tokens: 0 is not a size"):
        sizes_of(3, 24, tokens=[0])


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"enforce_eager": True}, "enforce_eager"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"speculative_config": {"method": "other"}}, "speculative_config"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(flags, name) -> None:
    with pytest.raises(ModulmError, match=f"{name}: not supported on tpu yet"):
        LLM("demo", device="tpu", **{**SETTINGS, **flags})


def test_what_is_refused_comes_with_what_to_use_instead() -> None:
    assert all("; use " in reason for reason in REFUSED.values())


@pytest.mark.exhaustive
def test_heads_that_choose_one_token_by_another_are_refused(tmp_path) -> None:
    from tests.plugins.speculators import test_dflash

    target = str(make_tiny(tmp_path / "target", num_hidden_layers=5))
    tensors = test_dflash.backbone() | test_dflash.markov()
    head = test_dflash.write(
        tmp_path / "head", tensors, "Qwen3DSparkModel", **test_dflash.SMALL_HEAD
    )
    table = {"method": "dspark", "model": head}
    with pytest.raises(ModulmError, match="Qwen3DSparkModel .* use a DFlashDraftModel head"):
        LLM(target, device="tpu", **{**SETTINGS, "speculative_config": table})


def test_a_replica_sees_its_own_chips_of_a_host(tmp_path, monkeypatch) -> None:
    """A stand-in for libtpu: the variables are there when JAX first looks for devices."""
    import jax

    from modulm_platform_tpu import platform

    seen: list[str | None] = []
    found = jax.local_devices()

    def local_devices() -> list[Any]:
        seen.append(os.environ.get("TPU_VISIBLE_CHIPS"))
        return found[:2]

    monkeypatch.setattr(platform, "look", lambda: (100, "TPUs"))
    monkeypatch.setattr(platform, "chip_memory", lambda: 32 << 30)
    monkeypatch.setattr(jax, "local_devices", local_devices)
    replica = platform.TpuPlatform()
    replica.take_share(2, 4)
    assert replica.memory().total == 32 << 30
    assert "replicas" in replica.describe()
    assert not seen
    assert replica._place(2).size == 2
    assert seen[0] == "2,3"
    assert seen[1:] == [None] * len(seen[1:])
    whole = platform.TpuPlatform()
    whole.take_share(0, 2)
    assert whole._place(2).size == 2
    assert "2,3" not in seen[1:]
    variables = chips_of(1, 1, tmp_path)
    assert variables["TPU_VISIBLE_CHIPS"] == "1"
    assert variables["TPU_PROCESS_PORT"] != chips_of(0, 1, tmp_path)["TPU_PROCESS_PORT"]
    for first, count in ((0, 3), (1, 2)):
        with pytest.raises(ConfigError, match="replicas on a TPU host have 1, 2, 4, 8 devices"):
            chips_of(first, count, tmp_path)


def test_without_a_tpu_it_is_chosen_explicitly(monkeypatch) -> None:
    from modulm_platform_tpu.platform import TpuPlatform

    assert TpuPlatform.probe().score == 1
    monkeypatch.delenv("JAX_PLATFORMS")
    assert TpuPlatform.probe().score == 0


def test_jax_is_not_imported_with_the_packages() -> None:
    """Files that are imported on other platforms import neither JAX nor files that do."""
    pure = {
        modulm_attention_pallas: ["backend"],
        modulm_kernels_pallas: ["codes", "provider", "tiles"],
        modulm_platform_tpu: ["devices", "platform", "hooks", "part", "settings", "sizes"],
    }
    names = {f"{package.__name__}.{name}" for package, files in pure.items() for name in files}
    for package, files in pure.items():
        for file in files:
            tree = ast.parse(Path(package.__file__).with_name(f"{file}.py").read_text())
            for node in tree.body:
                modules = [node.module] if isinstance(node, ast.ImportFrom) else []
                modules += (
                    [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                )
                for module in modules:
                    root = module.partition(".")[0]
                    assert root not in ("jax", "jaxlib", "torchax"), file
                    ours = root.endswith(("_pallas", "_tpu"))
                    assert not ours or module in names, f"{file} imports {module}"


@pytest.mark.exhaustive
def test_embeddings_and_sleep(tmp_path) -> None:
    folder = str(make_tiny(tmp_path, "Qwen3ForCausalLM"))
    vectors = []
    for device, more in (("cpu", {}), ("tpu", {"additional_config": SIZES})):
        settings = {**SETTINGS, **more, "runner": "pooling"}
        with LLM(folder, device=device, **settings) as llm:
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
            vectors.append([output.outputs.embedding for output in llm.embed(prompts)])
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-4)
    settings = {**SETTINGS, "dtype": "bfloat16", "enable_sleep_mode": True}
    with LLM(folder, device="tpu", additional_config=SIZES, **settings) as llm:
        expected = answers(llm, GREEDY)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            compare(expected, answers(llm, GREEDY))


#: Name -> a checkpoint, and flags of the TPU platform.
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "ngram": (
        "Qwen3ForCausalLM",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ),
    "a drafter by the model": ("Qwen3ForCausalLM", {"speculative": "auto"}),
    "suffix": (
        "FalconH1ForCausalLM",
        {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    ),
    "tensors over 2": ("Qwen3ForCausalLM", {"tensor_parallel_size": 2}),
    "experts over 4": (
        "Qwen3MoeForCausalLM",
        {"tensor_parallel_size": 4, "enable_expert_parallel": True},
    ),
    "states over 2": ("Qwen3NextForCausalLM", {"tensor_parallel_size": 2}),
    "latent over 2": ("DeepseekV3ForCausalLM", {"tensor_parallel_size": 2}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FEATURES)
def test_features_give_the_tokens_of_the_cpu(name, tmp_path) -> None:
    from modulm_platform_tpu.compilations import COMPILATIONS

    architecture, flags = FEATURES[name]
    folder = str(make_tiny(tmp_path, architecture))
    with LLM(folder, device="cpu", **SETTINGS) as llm:
        expected, others = answers(llm, GREEDY), answers(llm, ON_HOST)
    with LLM(folder, device="tpu", additional_config=SIZES, **SETTINGS, **flags) as llm:
        started = COMPILATIONS.count
        compare(expected, answers(llm, GREEDY))
        compare(others, answers(llm, ON_HOST))
        assert COMPILATIONS.count == started, "all programs are compiled at start"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "method", ["dflash", "draft_model", "eagle", "eagle3", "medusa", "mtp", "peagle"]
)
def test_drafts_are_those_of_the_cpu(method, tmp_path) -> None:
    """Drafters that run models: tokens, what is drafted for each text, and programs at start."""
    from tests.plugins.speculators import test_dflash, test_eagle, test_medusa

    from modulm_platform_tpu.compilations import COMPILATIONS

    settings = {**SETTINGS, "max_model_len": 128, "num_gpu_blocks_override": 60}
    if method == "mtp":
        from tests.plugins.speculators.test_mtp import LAYOUTS, Reference

        layout = LAYOUTS["DeepseekV3ForCausalLM"]
        target = str(make_tiny(tmp_path / "target", "DeepseekV3ForCausalLM", **layout.config))
        Reference(target, layout).store(target)
        table = {}
    else:
        target = str(make_tiny(tmp_path / "target", num_hidden_layers=5))
        table = {"model": str(tmp_path / "head")}
    if method == "draft_model":
        make_tiny(tmp_path / "head", num_hidden_layers=1)
    elif method == "medusa":
        test_medusa.own(tmp_path / "head", test_medusa.make_heads())
    elif method == "dflash":
        test_dflash.write(tmp_path / "head", test_dflash.backbone(), "DFlashDraftModel")
    elif method == "peagle":
        tensors = test_eagle.weights(6, True, False)
        tensors["mask_hidden"] = torch.randn(1, 1, 3 * test_eagle.HIDDEN)
        more = {**test_eagle.THREE, "ptd_token_id": test_eagle.MASK}
        test_eagle.write(tmp_path / "head", tensors, "PeagleLlamaForCausalLM", **more)
        method = "eagle3"
    elif method.startswith("eagle"):
        third = method == "eagle3"
        architecture = "LlamaForCausalLMEagle" + "3" * third
        more = test_eagle.THREE if third else {}
        test_eagle.write(
            tmp_path / "head", test_eagle.weights(1, third, False), architecture, **more
        )
    spec = {"method": method, "num_speculative_tokens": 3, "adaptive": False, **table}
    flags = {**settings, "speculative_config": spec, "logprobs_mode": "raw_logprobs"}
    expected, drafts = test_eagle.run(target, PROMPTS, **flags)
    late: list[int] = []
    start = LLM.generate

    def generate(llm: LLM, *arguments: Any, **more: Any) -> Any:
        before = COMPILATIONS.count
        outputs = start(llm, *arguments, **more)
        late.append(COMPILATIONS.count - before)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "generate", generate)
        got = test_eagle.run(target, PROMPTS, device="tpu", additional_config=SIZES, **flags)
    assert got == (expected, drafts)
    assert len(drafts) > 8
    assert late == [0], "all programs are compiled at start"


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["BertModel", "ModernBertModel", "Qwen3ForCausalLM"])
def test_vectors_are_those_of_the_cpu(architecture, tmp_path) -> None:
    folder = str(make_tiny(tmp_path, architecture))
    settings = {**SETTINGS, "max_num_batched_tokens": 64, "runner": "pooling"}
    vectors = []
    for device, more in (("cpu", {}), ("tpu", {"additional_config": SIZES})):
        with LLM(folder, device=device, **settings, **more) as llm:
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            vectors.append([output.outputs.embedding for output in llm.embed(prompts)])
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-4)


@pytest.mark.exhaustive
def test_adapters_change_what_they_change_on_the_cpu(tmp_path) -> None:
    from modulm_platform_tpu.compilations import COMPILATIONS

    folder = make_tiny(tmp_path / "model")
    shapes = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 32), "mlp.down_proj": (96, 64)}
    modules = {f"model.layers.{i}.{name}": size for i in range(2) for name, size in shapes.items()}
    loras = [
        LoRARequest(name, n, write_lora(tmp_path / name, modules, 4, n))
        for n, name in enumerate("abc", 1)
    ]
    prompts = [{"prompt_token_ids": list(range(first, first + 9))} for first in (5, 5, 5, 5)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    flags = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    found = []
    for device, more in (("cpu", {}), ("tpu", {"additional_config": SIZES})):
        with LLM(str(folder), device=device, **SETTINGS, **flags, **more) as llm:
            started = COMPILATIONS.count
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=[*loras, None])
            found.append([output.outputs[0] for output in outputs])
            assert COMPILATIONS.count == started
    compare(found[0], found[1])
    assert len({tuple(each.token_ids) for each in found[1]}) > 1


@pytest.mark.exhaustive
def test_images_are_seen_as_on_the_cpu(tmp_path) -> None:
    folder, pictures = write_llava(tmp_path / "llava"), images(((56, 42), (30, 60)))
    prompts = [
        "Once upon a time",
        {"prompt": "A <image><image> of", "multi_modal_data": {"image": pictures}},
    ]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
    settings = {**SETTINGS, "max_model_len": 128, "num_gpu_blocks_override": 40}
    found = []
    for device, more in (("cpu", {}), ("tpu", {"additional_config": SIZES})):
        with LLM(str(folder), device=device, **settings, **more) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0] for output in outputs])
    compare(found[0], found[1])


@pytest.mark.exhaustive
def test_encoder_decoders_are_refused(tmp_path) -> None:
    folder = str(make_tiny(tmp_path, "BartForConditionalGeneration"))
    with pytest.raises(ModulmError, match="device tpu: .* not supported yet"):
        LLM(folder, device="tpu", additional_config=SIZES, **SETTINGS)


@pytest.mark.exhaustive
def test_attention_keeps_the_contract() -> None:
    from modulm.plugins import manager
    from modulm.testing.attention import check_attention

    plugins = manager.current()
    platform = plugins.load("platforms", "tpu")()
    backend = plugins.load("attention", "pallas")
    check_attention(backend, platform, only=ATTENTION, quick=True)


#: What each of several machines runs: an engine with the same requests.
ON_EACH_HOST = """
import json, sys
from tests.plugins.platforms.tpu_checks import GREEDY, SETTINGS, SIZES, answers
from modulm import LLM

if __name__ == "__main__":
    folder, options, flags = sys.argv[1], *map(json.loads, sys.argv[2:])
    with LLM(folder, device="tpu", additional_config=SIZES | options, **SETTINGS, **flags) as llm:
        print("TOKENS", json.dumps([each.token_ids for each in answers(llm, GREEDY)]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("architecture", "flags"),
    [("Qwen3ForCausalLM", {}), ("Qwen3MoeForCausalLM", {"enable_expert_parallel": True})],
)
def test_two_hosts_give_the_tokens_of_the_cpu(architecture, flags, tmp_path) -> None:
    """Two processes, with two devices each, through `jax.distributed`."""
    folder = str(make_tiny(tmp_path, architecture))
    with LLM(folder, device="cpu", **SETTINGS) as llm:
        expected = [each.token_ids for each in answers(llm, GREEDY)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}",
    }
    hosts = [
        subprocess.Popen(
            [
                sys.executable, "-c", ON_EACH_HOST, folder,
                json.dumps({"coordinator": f"127.0.0.1:{port}", "hosts": 2, "host": host}),
                json.dumps({"tensor_parallel_size": 4, **flags}),
            ],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for host in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=900)[0] for process in hosts]
    finally:
        for process in hosts:
            process.kill()
    for text in said:
        (line,) = [line for line in text.splitlines() if line.startswith("TOKENS")]
        assert json.loads(line.removeprefix("TOKENS")) == expected


#: Prints the compilations at start and after it, and the tokens.
IN_A_PROCESS = """
import json, sys
from tests.plugins.platforms.tpu_checks import GREEDY, SETTINGS, SIZES, answers
from modulm import LLM

if __name__ == "__main__":
    from modulm_platform_tpu.compilations import COMPILATIONS

    folder, options, flags = sys.argv[1], *map(json.loads, sys.argv[2:])
    with LLM(folder, device="tpu", additional_config=SIZES | options, **SETTINGS, **flags) as llm:
        started = COMPILATIONS.count
        tokens = [each.token_ids for each in answers(llm, GREEDY)]
        print("SAID", json.dumps([started, COMPILATIONS.count - started, tokens]))
"""


@pytest.mark.exhaustive
def test_programs_are_kept_and_levels_say_what_is_compiled_at_start(tmp_path) -> None:
    folder, kept = str(make_tiny(tmp_path / "model")), tmp_path / "kept"

    def run(level: int) -> tuple[int, int, list[list[int]]]:
        done = subprocess.run(
            [
                sys.executable, "-c", IN_A_PROCESS, folder, json.dumps({"cache_dir": str(kept)}),
                json.dumps({"optimization_level": level}),
            ],
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
        started, late, tokens = json.loads(line.removeprefix("SAID"))
        return started, late, tokens

    started, late, tokens = run(2)
    programs = {path.name for path in kept.iterdir() if path.name.endswith("-cache")}
    assert late == 0
    assert len(programs) > 5
    assert run(2) == (started, 0, tokens)
    lazy_start, lazy_late, same = run(0)
    assert same == tokens
    assert lazy_start < started
    assert lazy_late > 0
    found = {path.name for path in kept.iterdir() if path.name.endswith("-cache")}
    assert found == programs, "later starts compile nothing that the first one kept"


def test_the_part_of_caches_that_one_device_holds() -> None:
    import jax

    from modulm_platform_tpu.placement import Placement

    def attention(heads: int, **more: Any) -> CacheSpec:
        return CacheSpec("layer", AttentionSpec(8, heads, 16, 1.0, "float32", "float32", **more))

    share_of = Placement(jax.local_devices()[:4]).cache_share
    states = StateSpec((("conv", (3, 64), "float32"), ("state", (8, 16, 96), "float32")))
    assert share_of([attention(4), attention(8)]) == 1 / 4
    assert share_of([attention(2)]) == share_of([attention(1, latent=16)]) == 1
    assert share_of([attention(4), attention(2)]) == (4 / 4 + 2) / 6
    # The states of convolutions are on every device: 192 numbers beside 12,288.
    both = [attention(4), CacheSpec("state", states)]
    assert share_of(both) == (192 + 12_288 / 4) / (192 + 12_288)


@pytest.mark.exhaustive
def test_caches_are_sized_by_all_devices_that_share_them(tmp_path) -> None:
    folder = str(make_tiny(tmp_path, "Qwen3ForCausalLM"))
    settings = {**SETTINGS, "num_gpu_blocks_override": None, "max_num_seqs": 64}
    settings |= {"max_num_batched_tokens": 128, "optimization_level": 0}
    tokens = []
    for size in (1, 2):
        flags = {"tensor_parallel_size": size, "gpu_memory_utilization": 0.0005}
        with LLM(folder, device="tpu", **settings, **flags) as llm:
            tokens.append(llm.info.cache_tokens)
    assert tokens[0] > 16 * 16
    # A block is for padding, and another may not be whole.
    assert 2 * tokens[0] - 2 * 16 <= tokens[1] <= 2 * tokens[0] + 2 * 16


def test_memory_is_known_without_jax(tmp_path) -> None:
    """A process that plans must leave the chips to the worker."""
    for kind, gib in (("0x006f", 32), ("0x1234", 0)):
        folder = tmp_path / kind / "0000:00:05.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "device").write_text(f"{kind}\n")
        assert chip_memory(tmp_path / kind) == gib << 30


@pytest.mark.exhaustive
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_narrow_caches_give_nearly_the_logits_of_wide_ones(
    kv_cache_dtype, architecture, tmp_path
) -> None:
    folder = str(make_tiny(tmp_path, architecture))
    found = []
    for more in ({}, {"kv_cache_dtype": kv_cache_dtype}):
        with LLM(folder, device="tpu", additional_config=SIZES, **SETTINGS, **more) as llm:
            found.append(answers(llm, GREEDY))
    wide, narrow = ([each.logprobs[0] for each in some if each.logprobs] for some in found)
    # Keys and values are off by one part in 2 * 127 of the largest, or by one in 2^4 for e4m3, each
    # in two layers; the error of a logit is less than the sum of four such parts.
    share = 4 / 254 if kv_cache_dtype == "int8" else 4 / 16
    for ours, other in zip(narrow, wide, strict=True):
        most = max(abs(entry.logprob) for entry in other.values())
        for token in ours.keys() & other.keys():
            assert abs(ours[token].logprob - other[token].logprob) < share * most


@pytest.mark.exhaustive
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantized_layers_give_the_tokens_of_the_cpu(quantization, tmp_path) -> None:
    folder = str(make_tiny(tmp_path, "Qwen3ForCausalLM"))
    tokens = []
    for device, more in (("cpu", {}), ("tpu", {"additional_config": SIZES})):
        with LLM(folder, device=device, quantization=quantization, **SETTINGS, **more) as llm:
            tokens.append([each.token_ids for each in answers(llm, GREEDY)])
    assert tokens[1] == tokens[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8", "nvfp4"])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_codes_in_bfloat16_give_nearly_the_logits_of_the_cpu(
    quantization, architecture, tmp_path
) -> None:
    """Layers stay codes; stacks of experts are dequantized."""
    folder = str(make_tiny(tmp_path, architecture))
    settings = {**SETTINGS, "dtype": "bfloat16", "quantization": quantization}
    if quantization in ("int8", "int4"):
        settings["quantization_config"] = {"activations": "bf16"}
    found = []
    for device, more in (("cpu", {}), ("tpu", {"additional_config": SIZES})):
        with LLM(folder, device=device, **settings, **more) as llm:
            found.append([each.logprobs[0] for each in answers(llm, GREEDY) if each.logprobs])
    for ours, other in zip(found[1], found[0], strict=True):
        assert ours.keys() & other.keys()
        most = max(abs(entry.logprob) for entry in other.values())
        for token in ours.keys() & other.keys():
            # Both round to bf16, to 2^-8 of a number, in each of two layers and their head, and
            # sum in other orders: four units of 2^-7.
            assert abs(ours[token].logprob - other[token].logprob) < 4 * 2**-7 * most
