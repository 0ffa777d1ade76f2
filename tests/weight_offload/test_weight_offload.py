"""Weights in host memory give the bits of weights on the device, and are there in time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import parametrize_sample

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.errors import ConfigError, EngineError, UnsupportedError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.testing.checkpoints import make_tiny
from modulm_memory.estimate import estimate
from modulm_weight_offload.filling import Offloaded, offloaded_of
from modulm_weight_offload.flags import OffloadConfig
from modulm_weight_offload.testing import (
    DenseKernels,
    MappingPlatform,
    OffloadPlatform,
    QueuedCopies,
)

FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 24,
    "block_size": 16, "device": "offload", "skip_tokenizer_init": True,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 99, 7, 300], [8] * 21)]
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
PREFETCH = {"offload_group_size": 2, "offload_num_in_group": 1}


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    with manager.using(PluginManager()) as plugins:
        for name, platform in (("offload", OffloadPlatform), ("mapping", MappingPlatform)):
            plugins.register("platforms", name, platform)
        plugins.register("kernels", "dense", DenseKernels)
        yield


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny model once."""
    folder, made = tmp_path_factory.mktemp("offload"), dict[str, Path]()

    def tiny(architecture: str, **config: Any) -> Path:
        key = f"{architecture}{len(config)}"
        if key not in made:
            made[key] = make_tiny(folder / key, architecture, **config)
        return made[key]

    return tiny


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        (
            list(output.outputs[0].token_ids),
            [{t: e.logprob for t, e in step.items()} for step in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def device_bytes(worker: Any) -> int:
    """Memory of all parameters and buffers, each once, without that in host memory.

    Those of layers whose maps other layers have taken are among them (DeepSeek's).
    """
    model, units = worker.loaded.model, worker.loaded.units
    offloaded = offloaded_of(model)
    host = {each.data_ptr() for each in offloaded.memory} if offloaded else set()
    modules = torch.nn.ModuleList([model, *(unit.module for unit in units)])
    tensors = (*modules.parameters(), *modules.buffers())
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(each.nbytes() for start, each in storages.items() if start not in host)


def opened(model: Path, **flags: Any) -> LLM:
    return LLM(str(model), **{**FLAGS, **flags})


def check_estimate(model: Path, held: tuple[int, int], **flags: Any) -> None:
    """What `modulm fit` expects is what a loaded model holds: on the device, and in host memory."""
    config = EngineConfig.from_keywords(model=str(model), **{**FLAGS, **flags})
    (rank,) = estimate(config, manager.current()).ranks
    assert (rank.weights.bytes, rank.weights.host) == pytest.approx(held, rel=0.05)


def run(model: Path, **flags: Any) -> tuple[list[Any], int, Offloaded | None]:
    with opened(model, **flags) as llm:
        (size,) = llm.collective_rpc(device_bytes)
        (offloaded,) = llm.apply_model(offloaded_of)
        return answers(llm), size, offloaded


@pytest.fixture(scope="module")
def plain(make: Callable[..., Path]) -> Callable[..., tuple[list[Any], int]]:
    """Answers of a model whose weights are on the device, and their bytes."""

    @cache
    def found(architecture: str) -> tuple[list[Any], int]:
        expected, size, _ = run(make(architecture))
        return expected, size

    return found


CASES = [
    ("LlamaForCausalLM", {"offload_group_size": 2}),
    ("LlamaForCausalLM", {"offload_group_size": 1, "offload_prefetch_step": 2}),
    ("MixtralForCausalLM", {"offload_group_size": 1}),
    ("Gemma3ForCausalLM", {"offload_group_size": 1, "offload_prefetch_step": 9}),
    ("DeepseekV3ForCausalLM", {"offload_group_size": 2, "offload_num_in_group": 2}),
    ("MambaForCausalLM", {"offload_group_size": 1, "offload_prefetch_step": 2}),
    ("GPT2LMHeadModel", {"offload_group_size": 2}),
    ("Qwen2ForCausalLM", {"cpu_offload_gb": 1}),
    ("Gemma2ForCausalLM", {"offload_group_size": 1, "async_scheduling": True}),
    ("FalconH1ForCausalLM", {"offload_group_size": 1}),
    ("Qwen3NextForCausalLM", {"offload_group_size": 1}),
    ("BloomForCausalLM", {"offload_group_size": 1}),
    ("GptOssForCausalLM", {"offload_group_size": 1, "offload_prefetch_step": 2}),
    ("Lfm2ForCausalLM", {"offload_group_size": 1}),
]


@parametrize_sample(("architecture", "flags"), CASES, every=13)
def test_the_bits_of_weights_on_the_device(
    make: Callable[..., Path],
    plain: Callable[..., tuple[list[Any], int]],
    architecture: str,
    flags: dict[str, Any],
) -> None:
    """The device holds what stays, and the buffers."""
    expected, whole = plain(architecture)
    found, left, offloaded = run(make(architecture), **flags)
    assert found == expected
    assert offloaded is not None
    held = max(len(memory) for memory in offloaded.memory)
    assert len(offloaded.buffers) == min(
        flags.get("offload_prefetch_step", 1), len(offloaded.layers)
    )
    assert all(len(buffer) == held for buffer in offloaded.buffers)
    moved = sum(len(memory) for memory in offloaded.memory)
    rounding = 256 * 40 * len(offloaded.layers)
    resident = left - sum(len(buffer) for buffer in offloaded.buffers)
    assert whole - rounding <= resident + moved <= whole + rounding
    check_estimate(make(architecture), (left, offloaded.host_bytes), **flags)


def test_layers_are_copied_before_they_run(make: Callable[..., Path]) -> None:
    """Two ahead: the next copy into a buffer starts when its layer has been launched."""
    model = make("LlamaForCausalLM", num_hidden_layers=4)
    flags = {"offload_group_size": 1, "offload_prefetch_step": 2}
    with opened(model, **flags) as llm:
        copies = OffloadPlatform.copies
        llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        copies.log.clear()
        first = copies._started
        llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        steps = [
            re.sub(r"\d+", lambda number: str(int(number[0]) - first), each)
            for each in copies.log
            if int(each.split()[1]) >= first
        ]
    asked = [each for each in steps if not each.startswith("copy")]
    assert asked == [
        "start 0", "start 1", "wait 0", "start 2", "wait 1", "start 3", "wait 2", "wait 3",
    ]  # fmt: skip
    ran = [each for each in steps if each.startswith("copy")]
    assert ran == ["copy 0", "copy 1", "copy 2", "copy 3"]
    assert steps.index("copy 0") > steps.index("wait 3")  # the host was not held up


def test_a_layer_that_did_not_wait_would_differ(
    make: Callable[..., Path],
    plain: Callable[..., tuple[list[Any], int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test device shows it: nothing is copied before something waits for it."""
    expected, _ = plain("LlamaForCausalLM")
    monkeypatch.setattr(QueuedCopies, "wait", lambda self, copy: None)
    try:
        found, *_ = run(make("LlamaForCausalLM"), offload_group_size=1)
    except EngineError:
        return
    assert found != expected


def test_only_named_weights(
    make: Callable[..., Path], plain: Callable[..., tuple[list[Any], int]]
) -> None:
    model, (expected, whole) = make("LlamaForCausalLM"), plain("LlamaForCausalLM")
    sizes = []
    for names in (["mlp.down_proj"], ["q_proj", "mlp"]):
        found, left, offloaded = run(model, offload_group_size=1, offload_params=names)
        assert found == expected
        assert offloaded is not None
        sizes.append(offloaded.host_bytes)
        assert left < whole
    assert sizes == sorted(set(sizes))
    for names in (["own_proj"], ["down"]):
        with pytest.raises(ConfigError, match=r"offload_params: .* is in the name of no weight"):
            run(model, offload_group_size=1, offload_params=names)


def test_mapped_weights_stay_where_they_are(
    make: Callable[..., Path], plain: Callable[..., tuple[list[Any], int]]
) -> None:
    """With unified addressing nothing is copied; --cpu-offload-gb bounds what is moved."""
    model, (expected, whole) = make("LlamaForCausalLM"), plain("LlamaForCausalLM")
    for size in (1.0, 100_000 / 2**30):
        found, left, offloaded = run(model, device="mapping", cpu_offload_gb=size)
        assert found == expected
        assert offloaded is not None
        assert offloaded.is_mapped
        assert not offloaded.buffers
        assert 0 < offloaded.host_bytes <= size * 2**30 * 1.1
        assert left < whole
        assert not OffloadPlatform.copies.log
        flags = {"device": "mapping", "cpu_offload_gb": size}
        check_estimate(model, (left, offloaded.host_bytes), **flags)


@pytest.mark.exhaustive
def test_weights_leave_a_sleeping_device(make: Callable[..., Path]) -> None:
    with opened(make("LlamaForCausalLM"), enable_sleep_mode=True, **PREFETCH) as llm:
        expected = answers(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm) == expected


def updated(model: Path, **flags: Any) -> list[Any]:
    """Answers before and after updates: of one layer's queries, of all weights, and back.

    Queries that are rounded come with the other parts of their layer.
    """
    from safetensors.torch import load_file

    from modulm_weights_shared_memory import SharedWeights

    tensors = load_file(model / "model.safetensors")
    changed = {name: tensor * 1.25 for name, tensor in tensors.items()}
    parts = (".1.self_attn.q_", ".1.self_attn.k_proj", ".1.self_attn.v_proj")
    sent = parts if flags.get("quantization") else parts[:1]
    queries = {n: tensor for n, tensor in changed.items() if any(part in n for part in sent)}
    assert queries
    with opened(model, weight_transfer_config={"backend": "shared_memory"}, **flags) as llm:
        found = [answers(llm)]
        llm.init_weight_transfer_engine()
        for update in (queries, changed, tensors):
            with SharedWeights(update) as shared:
                llm.start_weight_update(partial=update is queries)
                llm.update_weights(shared.info)
                llm.finish_weight_update()
            found.append(answers(llm))
    return found


@parametrize_sample(
    ("architecture", "flags"),
    [
        ("LlamaForCausalLM", {"offload_group_size": 1}),
        ("LlamaForCausalLM", {"offload_group_size": 1, "offload_prefetch_step": 2}),
        ("LlamaForCausalLM", {"device": "mapping", "cpu_offload_gb": 1}),
        ("LlamaForCausalLM", {"cpu_offload_gb": 1, "quantization": "int8"}),
        ("DeepseekV3ForCausalLM", {"offload_group_size": 1}),
        ("MixtralForCausalLM", {"offload_group_size": 2}),
    ],
    every=6,
)
def test_updates_of_weights_in_host_memory(
    make: Callable[..., Path], architecture: str, flags: dict[str, Any]
) -> None:
    model = make(architecture)
    quantization = {"quantization": flags.get("quantization")}
    expected = updated(model, **quantization)
    assert expected[0] == expected[3]
    assert expected[0] != expected[1] != expected[2] != expected[3]
    assert updated(model, **flags) == expected


@pytest.mark.exhaustive
def test_updates_of_experts_on_the_cpu(make: Callable[..., Path]) -> None:
    model = make("MixtralForCausalLM")
    flags = {"cpu_offload_experts": 2, "cpu_offload_experts_interval": 2}
    for found, expected in zip(updated(model, **flags), updated(model), strict=True):
        close(found, expected)


def close(found: list[Any], expected: list[Any]) -> None:
    """The same tokens, and log probabilities that differ by the order of additions."""
    for (tokens, logprobs), (other, others) in zip(found, expected, strict=True):
        assert tokens == other
        for step, expected_step in zip(logprobs, others, strict=True):
            assert step == pytest.approx(expected_step, abs=2e-5)


@parametrize_sample(
    ("architecture", "more"),
    [
        ("MixtralForCausalLM", {}),
        ("GptOssForCausalLM", {}),  # with biases
        ("DeepseekV3ForCausalLM", {"offload_group_size": 1}),
        ("Llama4ForCausalLM", {}),
    ],
    every=4,
)
def test_experts_on_the_cpu(
    make: Callable[..., Path],
    plain: Callable[..., tuple[list[Any], int]],
    architecture: str,
    more: dict[str, Any],
) -> None:
    """Those that tokens use more change their places with those that they use less."""
    model, (expected, whole) = make(architecture), plain(architecture)
    flags = {"cpu_offload_experts": 2, "cpu_offload_experts_interval": 2, **more}
    with opened(model, **flags) as llm:
        (offloaded,) = llm.apply_model(offloaded_of)
        (left,) = llm.collective_rpc(device_bytes)
        assert left < whole
        close(answers(llm), expected)
        check_estimate(model, (left, offloaded.host_bytes), **flags)
        mixtures = offloaded.mixtures
        assert all(len(mixture.on_host) == 2 for mixture in mixtures)
        assert sum(mixture.moved for mixture in mixtures) > 0


def test_experts_move_by_their_use() -> None:
    """After an exchange the host has the experts that were used least."""
    from modulm.ops import twins
    from modulm_weight_offload.experts import CpuExperts

    platform = OffloadPlatform()
    copies = platform.host_copies()
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(6, 16, 8, generator=generator)
    down = torch.randn(6, 8, 8, generator=generator)
    host = [{e: stack[e].clone() for e in (4, 5)} for stack in (gate_up, down)]
    experts = CpuExperts(DenseKernels().ops()["fused_experts"], host, 6, platform, copies, 2)
    stacks = gate_up[:4].clone(), down[:4].clone()
    for step in range(6):
        ids = torch.tensor([[5, 4], [5, step % 3], [5, 0]])
        x = torch.randn(3, 8, generator=generator)
        weights = torch.rand(3, 2, generator=generator)
        with platform.queue():
            fetched = platform.fetch((experts.compute(x, weights, ids, *stacks),))
        result = torch.from_numpy(fetched.wait()[0])
        assert torch.allclose(
            result, twins.fused_experts(x, weights, ids, gate_up, down), atol=1e-4
        )
    assert experts.on_host == {1, 3}
    assert experts.moved == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"offload_backend": "prefetch"}, "set --offload-group-size"),
        ({"offload_backend": "uva"}, "set --cpu-offload-gb"),
        ({"offload_group_size": 2, "offload_num_in_group": 3}, "more than --offload-group-size"),
        ({"offload_group_size": 2, "offload_prefetch_step": 0}, "at least 1"),
        ({"offload_params": ["mlp"]}, "no effect without --offload-group-size"),
        ({"cpu_offload_params": ["mlp"]}, "no effect without --cpu-offload-gb"),
        ({"offload_backend": "disk"}, "not one of auto, uva, prefetch"),
    ],
)
def test_flags_that_contradict(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OffloadConfig(**flags).check()


def test_refusals(make: Callable[..., Path]) -> None:
    llama, mixtral = make("LlamaForCausalLM"), make("MixtralForCausalLM")
    for model, flags, message in (
        (llama, {"device": "cpu", "cpu_offload_gb": 1}, "--weights-memory mmap runs"),
        (llama, {"offload_group_size": 60}, "more than the 3 layers"),
        (llama, {"cpu_offload_gb": 1e-9}, "no weights of a layer are chosen"),
        (llama, {"cpu_offload_experts": 1}, "has no experts"),
        (mixtral, {"cpu_offload_experts": 64}, "keep one at least"),
        (mixtral, {"cpu_offload_experts": 1, "batch_invariant": True}, "not with"),
    ):
        with pytest.raises((ConfigError, UnsupportedError), match=message):
            run(model, **flags)
