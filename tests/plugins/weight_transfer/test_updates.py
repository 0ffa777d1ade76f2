"""An engine after an update gives the bits of one that has loaded the same checkpoint."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import parametrize_sample
from torch import Tensor

from modulm import LLM, LoRARequest, SamplingParams
from modulm.contracts.quantization import LinearSpec, QuantizationMethod
from modulm.errors import (
    ConfigError,
    EngineAsleep,
    EngineError,
    EngineStalled,
    RequestError,
    UnsupportedError,
)
from modulm.nn.weight_slots import Unit
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny
from modulm_quant_rtn.methods import Int4
from modulm_quantized.codes import Codes
from modulm_weight_transfer import direct
from modulm_weight_transfer.deltas import changed_values
from modulm_weight_transfer.receiver import receiver_of
from modulm_weight_transfer.refill import loaded_tensors
from modulm_weights_gloo import WeightBroadcaster
from modulm_weights_shared_memory import SharedWeights

FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 64,
    "cpu_threads": 1,
}  # fmt: skip
SHARED = {"weight_transfer_config": {"backend": "shared_memory"}}
PROMPT = {"prompt_token_ids": list(range(5, 45))}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
Answer = tuple[list[int], list[dict[int, float]]]


def answer(llm: LLM, lora: LoRARequest | None = None) -> Answer:
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False, lora_request=lora)
    first = output.outputs[0]
    logprobs = [{token: entry.logprob for token, entry in step.items()} for step in first.logprobs]
    return list(first.token_ids), logprobs


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def update(llm: LLM, tensors: dict[str, Tensor], partial: bool = False) -> None:
    with SharedWeights(tensors) as shared:
        llm.start_weight_update(partial=partial)
        llm.update_weights({"update_info": shared.info})
        llm.finish_weight_update()


@parametrize_sample(
    ("architecture", "flags"),
    [
        ("Qwen2ForCausalLM", {"dtype": "bfloat16", "quantization": "int4"}),
        ("Qwen2ForCausalLM", {"dtype": "bfloat16"}),  # with biases
        ("MixtralForCausalLM", {"dtype": "bfloat16", "quantization": "int8"}),
        ("MixtralForCausalLM", {"dtype": "bfloat16"}),
        ("DeepseekV2ForCausalLM", {"dtype": "bfloat16"}),
        ("Gemma2ForCausalLM", {}),
        ("ApertusForCausalLM", {}),
        ("MambaForCausalLM", {}),
        ("LlamaForCausalLM", {"dtype": "bfloat16", "enforce_eager": True}),
    ],
    every=4,
)
def test_families_and_formats(architecture: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """Fused and packed layers, experts, absorbed layers, tied heads, constants, states."""
    old, new = (make_tiny(tmp_path / str(seed), architecture, seed=seed) for seed in (1, 2))
    with LLM(str(new), **{**FLAGS, **flags}) as llm:
        expected = answer(llm)
    with LLM(str(old), **{**FLAGS, **flags}, **SHARED) as llm:
        before = answer(llm)
        llm.init_weight_transfer_engine()
        for tensors, result in ((new, expected), (old, before), (new, expected)):
            update(llm, tensors_of(tensors))
            assert answer(llm) == result
        assert llm.get_weight_version() == 3
    assert before != expected


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    old, new = (make_tiny(root / str(seed), "Qwen3ForCausalLM", seed=seed) for seed in (1, 2))
    return old, new


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> Answer:
    with LLM(str(folders[1]), **FLAGS) as llm:
        return answer(llm)


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(str(folders[0]), **FLAGS, **SHARED, enable_sleep_mode=True) as llm:
        llm.init_weight_transfer_engine({"init_info": {}})
        yield llm


@pytest.fixture(scope="module")
def first(llm: LLM) -> Answer:
    return answer(llm)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": torch.ones(3)}, r"wrong shapes: model\.norm\.weight .* is \[3\]"),
        ({"model.nothing.weight": torch.ones(3)}, r"unexpected weights: model\.nothing\.weight"),
        ({"model.norm.weight": None}, r"missing weights: model\.norm\.weight"),
        ({"model.norm.weight": torch.full((64,), torch.nan)}, r"model\.norm\.weight has NaN"),
        ({"model.norm.weight": torch.full((64,), torch.inf)}, r"model\.norm\.weight has inf"),
        (
            {"model.norm.weight": torch.tensor([-torch.inf, *[1.0] * 63], dtype=torch.bfloat16)},
            r"model\.norm\.weight has inf",
        ),
        ({"model.layers.0.self_attn.k_proj.weight": None}, r"missing.*self_attn\.k_proj\.weight"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    llm: LLM, folders: tuple[Path, Path], first: Answer, change: dict[str, Any], message: str
) -> None:
    """The old weights go on, whatever came before in the same update."""
    version = llm.get_weight_version()
    tensors = {name: t for name, t in {**tensors_of(folders[1]), **change}.items() if t is not None}
    with pytest.raises(RequestError, match=message):
        update(llm, tensors)
    llm.reset_prefix_cache()
    assert answer(llm) == first
    assert llm.get_weight_version() == version


def test_order_of_calls(llm: LLM, folders: tuple[Path, Path], first: Answer) -> None:
    with SharedWeights(tensors_of(folders[1])) as shared:
        llm.start_weight_update()
        llm.update_weights(shared.info)
        with pytest.raises(RequestError, match="occurs twice in one update"):
            llm.update_weights(shared.info)
        llm.start_weight_update()  # the first one is dropped
        with pytest.raises(RequestError, match="no weights were received"):
            llm.finish_weight_update()
        with pytest.raises(RequestError, match="segment: modulm-shared-weights-0"):
            llm.update_weights({**shared.info, "segment": "modulm-shared-weights-" + "0" * 32})
        with pytest.raises(RequestError, match="exceeds the shared memory"):
            llm.update_weights({**shared.info, "shapes": [[1 << 30]] * len(shared.info["names"])})
    with pytest.raises(UnsupportedError, match="is_checkpoint_format"):
        llm.start_weight_update(is_checkpoint_format=False)
    assert answer(llm) == first


def test_an_update_in_pieces_of_some_tensors(
    llm: LLM, folders: tuple[Path, Path], expected: Answer, first: Answer
) -> None:
    """Parts of a fused layer come in two calls; later calls bring what is left of the model."""
    tensors, old = tensors_of(folders[1]), tensors_of(folders[0])
    names = list(tensors)
    llm.start_weight_update(partial=True)
    with SharedWeights({n: tensors[n] for n in names[::2]}) as one:
        llm.update_weights(one.info)
        with SharedWeights({n: tensors[n] for n in names[1::2]}) as two:
            llm.update_weights(two.info)
            llm.finish_weight_update()
    assert answer(llm) == expected
    update(llm, {"model.norm.weight": old["model.norm.weight"]}, partial=True)
    assert answer(llm) not in (expected, first)
    gates = {n: t for n, t in old.items() if n.endswith("gate_proj.weight")}
    update(llm, gates, partial=True)  # parts of a fused layer
    update(llm, {n: t for n, t in old.items() if n not in gates}, partial=True)
    assert answer(llm) == first


def while_steps_go_on(llm: LLM, info: dict[str, Any]) -> None:
    """Update as `AsyncLLM` does."""
    state = llm._weights.run("update", {"update_info": info, "wait": False})
    while state["checking"]:
        time.sleep(0.001)
        state = llm._weights.run("verify", {"wait": False})


def test_layers_are_rounded_while_steps_go_on(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only copies are left for `finish_weight_update`, whatever was refused before."""
    rounded: list[str] = []

    def codes(self: Int4, stored: dict[str, Tensor], spec: LinearSpec) -> tuple[Codes, ...]:
        rounded.append(spec.name)
        return codes_of(self, stored, spec)

    codes_of = Int4.codes
    monkeypatch.setattr(Int4, "codes", codes)
    flags = {**FLAGS, "dtype": "bfloat16", "quantization": "int4"}
    with LLM(str(folders[1]), **flags) as llm:
        expected, layers = answer(llm), len(rounded)
    with LLM(str(folders[0]), **flags, **SHARED) as llm:
        before = answer(llm)
        llm.init_weight_transfer_engine()
        tensors = tensors_of(folders[1])
        last = "model.layers.0.self_attn.q_proj.weight"
        with (
            SharedWeights({n: t for n, t in tensors.items() if n != last}) as most,
            SharedWeights({last: torch.full_like(tensors[last], torch.nan)}) as broken,
            SharedWeights({last: tensors[last]}) as rest,
        ):
            for sent in ((most,), (most, broken), (most, rest)):
                rounded.clear()
                llm.start_weight_update()  # what was prepared before is dropped
                for shared in sent:
                    refused = pytest.raises(RequestError, match="has NaN")
                    with refused if shared is broken else nullcontext():
                        while_steps_go_on(llm, shared.info)
                llm.reset_prefix_cache()
                assert answer(llm) == before
            assert len(rounded) == layers
            llm.finish_weight_update()
        assert len(rounded) == layers
        assert answer(llm) == expected


def sparse(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The same tensors, some of whose values are others."""
    draw = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in tensors.items():
        mask = torch.rand(tensor.shape, generator=draw) < 0.02
        changed[name] = torch.where(mask, torch.randn(tensor.shape, generator=draw) / 4, tensor)
        changed[name] = changed[name].to(tensor.dtype)
    return changed


@parametrize_sample(
    ("architecture", "flags"),
    [("Qwen3ForCausalLM", {}), ("MixtralForCausalLM", {"dtype": "bfloat16"})],
    every=2,
)
def test_changed_values_alone(architecture: str, flags: dict[str, Any], tmp_path: Path) -> None:
    """As if the whole tensors had come: fused layers, norms, tied heads, experts."""
    folder = make_tiny(tmp_path, architecture, seed=1)
    old = tensors_of(folder)
    new = sparse(old, 1)
    tensors, shapes = changed_values(old, new)
    with LLM(str(folder), **{**FLAGS, **flags}, **SHARED) as llm:
        llm.init_weight_transfer_engine()
        before = answer(llm)
        update(llm, new)
        expected = answer(llm)
        update(llm, old)
        with SharedWeights(tensors) as shared:
            llm.start_weight_update(partial=True)
            llm.update_weights({**shared.info, "deltas": shapes})
            llm.finish_weight_update()
        assert answer(llm) == expected != before


def test_changed_values_that_do_not_fit(
    llm: LLM, folders: tuple[Path, Path], first: Answer, tmp_path: Path
) -> None:
    name = "model.norm.weight"

    def send(
        llm: LLM, indices: list[int], values: list[float], shape: list[int], to: str = name
    ) -> None:
        tensors = {f"{to}.indices": torch.tensor(indices), f"{to}.values": torch.tensor(values)}
        with SharedWeights(tensors) as shared:
            llm.start_weight_update(partial=True)
            llm.update_weights({**shared.info, "deltas": {to: shape}})
            llm.finish_weight_update()

    for arguments, message in (
        (([64], [1.0], [64]), r"model\.norm\.weight: index 64 is outside the 64 values"),
        (([-1], [1.0], [64]), "index -1 is outside"),
        (([3, 3], [1.0, 2.0], [64]), r"model\.norm\.weight: an index occurs twice"),
        (([3], [1.0, 2.0], [64]), "of one length"),
        (([3], [torch.nan], [64]), r"model\.norm\.weight\.values has NaN"),
        (([3], [1.0], [65]), r"wrong shapes: model\.norm\.weight .* is \[65\]"),
        (([3], [1.0], [64], "model.nothing.weight"), r"unexpected weights: model\.nothing"),
    ):
        with pytest.raises(RequestError, match=message):
            send(llm, *arguments)
    llm.start_weight_update(partial=True)
    with (
        SharedWeights({f"{name}.values": torch.ones(1)}) as shared,
        pytest.raises(RequestError, match=r"a delta needs model\.norm\.weight\.indices"),
    ):
        llm.update_weights({**shared.info, "deltas": {name: [64]}})
    assert answer(llm) == first
    flags = {**FLAGS, "dtype": "bfloat16", "quantization": "int8"}
    layer = "model.layers.0.mlp.down_proj.weight"
    shape = list(tensors_of(folders[0])[layer].shape)
    with LLM(str(folders[0]), **flags, **SHARED) as other:
        other.init_weight_transfer_engine()
        with pytest.raises(RequestError, match=r"down_proj\.weight: its layer keeps other values"):
            send(other, [3], [1.0], shape, layer)
        send(other, [3], [1.5], [64])  # a norm is not quantized


def test_memory_stays_where_it_is(llm: LLM, folders: tuple[Path, Path]) -> None:
    """Weights are refilled in place, however often they are updated."""

    def places(model: torch.nn.Module) -> list[int]:
        return [parameter.data_ptr() for parameter in model.parameters()]

    before = llm.apply_model(places)
    for _ in range(10):
        update(llm, tensors_of(folders[0]))
    assert llm.apply_model(places) == before


def test_layers_without_quantization_are_overwritten(llm: LLM, folders: tuple[Path, Path]) -> None:
    """None is loaded again, and recorded steps stay."""

    def receivers(worker: Any) -> tuple[bool, bool]:
        receiver = receiver_of(worker)
        model = receiver._spare
        return set(model._writers) == {id(unit) for unit in model.units}, model.replaced

    update(llm, tensors_of(folders[0]))
    assert llm.collective_rpc(receivers) == [(True, False)]


def test_weights_that_were_released_are_the_checkpoints(
    llm: LLM, folders: tuple[Path, Path], first: Answer
) -> None:
    update(llm, tensors_of(folders[1]))
    version = llm.get_weight_version()
    for level in (0, 2):
        assert not llm.is_sleeping()
        llm.sleep(level)
        assert llm.is_sleeping()
        llm.wake_up()
    assert not llm.is_sleeping()
    assert llm.get_weight_version() == version + 1
    assert answer(llm) == first
    llm.update_weight_version(70)
    assert llm.get_weight_version() == 70


def test_waking_up_writes_layers_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All linear layers, also with biases and of several parts, are as loading made them."""
    allocated: list[str] = []
    real = direct._allocate

    def allocate(unit: Unit, device: torch.device) -> dict[str, Any] | None:
        writers = real(unit, device)
        allocated.extend([unit.path] * (writers is not None))
        return writers

    monkeypatch.setattr(direct, "_allocate", allocate)
    folder = make_tiny(tmp_path, "Qwen2ForCausalLM", seed=1, tie_word_embeddings=False)
    flags = {**FLAGS, "dtype": "bfloat16", "enable_sleep_mode": True}
    with LLM(str(folder), **flags) as llm:
        before, values = answer(llm), llm.apply_model(held_values)[0]
        assert not allocated
        llm.sleep(2)
        llm.wake_up()
        assert llm.apply_model(held_values)[0] == values
        assert answer(llm) == before
    assert {path.rpartition(".")[2] for path in allocated} == {
        "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head",
    }  # fmt: skip


def held_values(model: torch.nn.Module) -> dict[str, bytes]:
    """All that loading has put into a model's modules."""
    return {
        f"{path} {number}": tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for path, module in model.named_modules()
        for number, tensor in enumerate(loaded_tensors(module, QuantizationMethod))
    }


@pytest.mark.exhaustive
def test_weights_wake_up_before_the_caches(
    llm: LLM, folders: tuple[Path, Path], expected: Answer, first: Answer
) -> None:
    """As trainers do: all memory is given back, weights come, and then the caches."""
    for level in (2, 1):
        llm.sleep(level)
        if level == 2:
            with pytest.raises(RequestError, match="wake up weights before kv_cache"):
                llm.wake_up(["kv_cache"])
        with pytest.raises(RequestError, match="must be some of weights, kv_cache, scheduling"):
            llm.wake_up(["cuda_graphs"])
        llm.wake_up(["weights"])
        update(llm, tensors_of(folders[1]))
        with pytest.raises(EngineAsleep, match="wake it up first"):
            answer(llm)
        llm.wake_up(["kv_cache"])
        assert answer(llm) == expected
        update(llm, tensors_of(folders[0]))
        assert answer(llm) == first


def test_ranks_and_files(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Each rank cuts its share out of the files."""
    config = {"backend": "files", "folder": str(tmp_path)}
    save_file(tensors_of(folders[1]), tmp_path / "model.safetensors")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "step-1" / "model.safetensors")
    flags = {**FLAGS, "tensor_parallel_size": 2}
    with LLM(str(folders[1]), **flags) as llm:
        expected = answer(llm)
    with LLM(str(folders[0]), **flags, weight_transfer_config=config) as llm:
        before = answer(llm)
        llm.init_weight_transfer_engine()
        llm.start_weight_update()
        with pytest.raises(RequestError, match="not a folder inside"):
            llm.update_weights({"path": ".."})
        broken = tensors_of(folders[1])
        broken[list(broken)[3]].fill_(torch.nan)  # which one rank looks at
        (tmp_path / "broken").mkdir()
        save_file(broken, tmp_path / "broken" / "model.safetensors")
        with pytest.raises(RequestError, match="has NaN"):
            llm.update_weights({"path": "broken"})
        assert answer(llm) == before
        llm.update_weights({"path": "step-1"})
        llm.finish_weight_update()
        assert answer(llm) == expected


def test_adapters_stay(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Plain ones, and DoRA, whose scales depend on the weights."""
    modules = {f"model.layers.{i}.self_attn.q_proj": (64, 96) for i in range(2)}
    plain = LoRARequest("plain", 1, write_lora(tmp_path / "plain", modules, 4, 1))
    dora = write_lora(tmp_path / "dora", modules, 4, 2, use_dora=True)
    tensors = load_file(dora / "adapter_model.safetensors")
    for name in modules:
        tensors[f"base_model.model.{name}.lora_magnitude_vector"] = torch.full((96,), 2.0)
    save_file(tensors, dora / "adapter_model.safetensors")
    loras = [plain, LoRARequest("dora", 2, dora)]
    flags = {**FLAGS, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with LLM(str(folders[1]), **flags) as llm:
        expected = [answer(llm, lora) for lora in loras]
    with LLM(str(folders[0]), **flags, **SHARED) as llm:
        before = [answer(llm, lora) for lora in loras]
        llm.init_weight_transfer_engine()
        update(llm, tensors_of(folders[1]))
        assert [answer(llm, lora) for lora in loras] == expected
    assert before != expected


def test_an_adapter_alone(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """New tensors of a loaded adapter, as if its files had been other ones; DoRA as well."""
    modules = {f"model.layers.{i}.self_attn.q_proj": (64, 96) for i in range(2)}
    old, new = (write_lora(tmp_path / str(i), modules, 4, i) for i in (1, 2))
    tensors = load_file(new / "adapter_model.safetensors")
    lora = LoRARequest("policy", 1, old)
    flags = {**FLAGS, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 2}

    def send(llm: LLM, tensors: dict[str, Tensor], name: str = "policy") -> None:
        with SharedWeights(tensors) as shared:
            llm.start_weight_update(partial=True)
            llm.update_weights({**shared.info, "adapter": name})
            llm.finish_weight_update()

    with LLM(str(folders[0]), **flags, **SHARED) as llm:
        expected = answer(llm, LoRARequest("expected", 2, new))
        before, plain = answer(llm, lora), answer(llm)
        llm.init_weight_transfer_engine()
        first, *_ = tensors
        for change, name, message in (
            ({}, "nobody", "there is no adapter 'nobody'"),
            ({first: torch.full_like(tensors[first], torch.nan)}, "policy", f"{first} has NaN"),
            ({first: torch.zeros(3, 3)}, "policy", r"policy, the update: .*q_proj"),
            ({"base_model.model.nothing.lora_A.weight": torch.ones(4, 4)}, "policy", "nothing"),
        ):
            with pytest.raises(RequestError, match=message):
                send(llm, {**tensors, **change}, name)
        llm.reset_prefix_cache()
        assert answer(llm, lora) == before
        send(llm, tensors)
        assert answer(llm, lora) == expected != before
        assert answer(llm) == plain


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_broadcast(folders: tuple[Path, Path], expected: Answer) -> None:
    """Values that turn out bad when others are in place leave an engine that says so."""
    config = {"backend": "gloo", "timeout": 300}
    tensors = tensors_of(folders[1])
    sender = WeightBroadcaster("127.0.0.1", free_port(), timeout=300)

    def send(sent: dict[str, Tensor]) -> None:
        thread = threading.Thread(target=sender.send, args=(sent,))
        thread.start()
        try:
            llm.update_weights(WeightBroadcaster.info(tensors))
        finally:
            thread.join()

    with LLM(str(folders[0]), **FLAGS, weight_transfer_config=config) as llm:
        meeting = threading.Thread(target=sender.connect)
        meeting.start()
        llm.init_weight_transfer_engine(sender.init_info)
        meeting.join()
        llm.start_weight_update()
        with pytest.raises(RequestError, match="missing weights"):
            llm.update_weights(WeightBroadcaster.info(dict(list(tensors.items())[:3])))
        send(tensors)
        llm.finish_weight_update()
        assert answer(llm) == expected
        last = list(tensors)[-1]
        bad = {**tensors, last: torch.full_like(tensors[last], torch.nan)}
        with pytest.raises(ValueError, match=f"{last} has values"):
            WeightBroadcaster.info(bad)
        llm.start_weight_update()
        with pytest.raises(EngineError, match=f"failed half way.*{last} has NaN"):
            send(bad)
        with pytest.raises(EngineStalled, match="send a complete update"):
            answer(llm)
        llm.start_weight_update()
        send(tensors)
        llm.finish_weight_update()
        assert answer(llm) == expected
        assert llm.get_weight_version() == 2


def test_load_weights_of_a_trainer_in_the_process(
    folders: tuple[Path, Path], expected: Answer
) -> None:
    """What TRL calls in colocate mode, one parameter at a time, its memory used again."""
    from vllm import LLM as Standin

    with Standin(str(folders[0]), **FLAGS, enable_sleep_mode=True) as llm:
        before = answer(llm)
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        tensors = tensors_of(folders[1])
        for name, tensor in tensors.items():
            passed = tensor.clone()
            assert model.load_weights([(name, passed)]) == {name}
            passed.zero_()
        assert llm.reset_prefix_cache()
        assert answer(llm) == expected != before
        assert llm.get_weight_version() == 1
        with pytest.raises(ValueError, match="unexpected weights: model\\.nothing"):
            model.load_weights([("model.nothing", torch.ones(3))])
        llm.sleep(level=2)
        llm.wake_up(["weights"])
        model.load_weights(tensors.items())
        llm.wake_up(["kv_cache"])
        assert answer(llm) == expected  # without a reset
    with LLM(str(folders[0]), **FLAGS, **SHARED) as other:
        names = Standin.from_config(other.info.config)
        with names, pytest.raises(ValueError, match="use update_weights with the chosen backend"):
            names._local_weights.load_weights(tensors.items())


def test_the_names_that_trainers_broadcast_with(
    folders: tuple[Path, Path], expected: Answer
) -> None:
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLTrainerSendWeightsArgs as Arguments,
    )
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Engine
    from vllm.utils.network_utils import get_ip, get_open_port

    assert get_ip().count(".") == 3
    tensors = tensors_of(folders[1])
    info = {"master_address": "127.0.0.1", "master_port": get_open_port(), "rank_offset": 1,
            "world_size": 2}  # fmt: skip
    with pytest.raises(ValueError, match="master_port is required"):
        Engine.trainer_init({"master_address": "x", "world_size": 2})
    with ThreadPoolExecutor(1) as pool, LLM(
        str(folders[0]), **FLAGS, weight_transfer_config={"backend": "gloo"}
    ) as llm:  # fmt: skip
        connecting = pool.submit(Engine.trainer_init, info)
        llm.init_weight_transfer_engine(info)
        group = connecting.result()
        llm.start_weight_update()
        sending = pool.submit(
            Engine.trainer_send_weights, iter(tensors.items()), Arguments(group=group, packed=True)
        )
        llm.update_weights({**WeightBroadcaster.info(tensors), "packed": True})
        sending.result()
        llm.finish_weight_update()
        assert answer(llm) == expected
        group.group.store = group.group.socket = None  # TRL's way to close


def test_the_flag(folders: tuple[Path, Path], llm: LLM) -> None:
    for config, message in (
        ({"backend": "smoke"}, "backend: .*'smoke'"),
        ({"folder": "x"}, "backend: must be the name of a backend"),
        ({"backend": "files"}, "folder"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(folders[0]), **FLAGS, weight_transfer_config=config)
    with (
        LLM(str(folders[0]), **FLAGS) as other,
        pytest.raises(UnsupportedError, match="--weight-transfer-config"),
    ):
        other.init_weight_transfer_engine()
