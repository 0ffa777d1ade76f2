"""The platforms of GPUs against fake drivers: nothing here ran on hardware."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from samples import parametrize_sample

from modulm import LLM, SamplingParams
from modulm.errors import ConfigError
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.platform import check_platform
from modulm_gpu.fake_driver import FakeDriver, FakeRuntime
from modulm_gpu.graphs import RuntimeGraphs

CHIPS = {
    "H200": ("cuda", {"name": "NVIDIA H200", "major": 9, "minor": 0}),
    "A100": ("cuda", {"name": "NVIDIA A100", "major": 8, "minor": 0}),
    "T4": ("cuda", {"name": "Tesla T4", "major": 7, "minor": 5}),
    "MI300X": ("rocm", {"name": "AMD Instinct MI300X", "gcnArchName": "gfx942:sramecc+:xnack-"}),
    "MI350X": ("rocm", {"name": "AMD Instinct MI350X", "gcnArchName": "gfx950"}),
    "MI250X": ("rocm", {"name": "AMD Instinct MI250X", "gcnArchName": "gfx90a:sramecc+"}),
    "RX 9070": ("rocm", {"name": "AMD Radeon RX 9070", "gcnArchName": "gfx1201"}),
    "RX 7900": ("rocm", {"name": "AMD Radeon RX 7900", "gcnArchName": "gfx1100"}),
    "RX 6800": ("rocm", {"name": "AMD Radeon RX 6800", "gcnArchName": "gfx1030"}),
    "Max 1550": ("xpu", {"name": "Intel Data Center GPU Max 1550"}),
}


def fake(chip: str, count: int = 1, hip: str | None = None) -> type:
    """The platform's class over a driver that tells of such a chip."""
    name, properties = CHIPS[chip]
    hip = "7.0" if name == "rocm" and hip is None else hip
    driver = manager.current().load("platforms", name)
    kind = "xpu" if name == "xpu" else "cuda"
    runtime = FakeRuntime(kind, FakeDriver(count, **properties), hip or None)
    return type(f"Fake{name}", (driver,), {"runtime": runtime})


@pytest.mark.parametrize("chip", CHIPS)
def test_contract(chip) -> None:
    check_platform(fake(chip))


def test_only_one_of_two_platforms_takes_a_gpu_of_torch_cuda() -> None:
    probes = {
        (chip, hip): fake(chip, hip=hip).probe() for chip in ("H200", "MI300X") for hip in ("7", "")
    }
    assert {where: probe.score for where, probe in probes.items()} == {
        ("H200", ""): 100, ("H200", "7"): 0, ("MI300X", "7"): 100, ("MI300X", ""): 0,
    }  # fmt: skip
    assert probes["H200", ""].reason == "torch sees 1 NVIDIA GPU"
    assert probes["H200", "7"].reason == "this torch is built for AMD GPUs"
    assert probes["MI300X", ""].reason == "this torch is not built for AMD GPUs"


@pytest.mark.parametrize("chip", ["H200", "MI300X", "Max 1550"])
def test_no_gpu_and_a_broken_driver_are_reasons(chip) -> None:
    none, broken = fake(chip, count=0), fake(chip)

    def fails() -> bool:
        raise RuntimeError("the driver is too old")

    broken.runtime.module.is_available = fails
    assert none.probe().score == broken.probe().score == 0
    assert "sees no" in none.probe().reason
    assert broken.probe().reason == "torch cannot reach a GPU: the driver is too old"


@pytest.mark.parametrize(
    ("chip", "best", "fp8", "wave"),
    [
        ("H200", "bfloat16", "float8_e4m3fn", None),
        ("A100", "bfloat16", None, None),
        ("T4", "float16", None, None),
        ("MI300X", "bfloat16", "float8_e4m3fnuz", 64),
        ("MI350X", "bfloat16", "float8_e4m3fn", 64),
        ("MI250X", "bfloat16", None, 64),
        ("RX 9070", "bfloat16", "float8_e4m3fn", 32),
        ("RX 7900", "bfloat16", None, 32),
        ("RX 6800", "float16", None, 32),
        ("Max 1550", "bfloat16", None, None),
    ],
)
def test_what_a_chip_can_do(chip, best, fp8, wave) -> None:
    platform = fake(chip)()
    platform.start()
    assert platform.dtypes[0] == best
    assert platform.fp8 == fp8
    assert {name for name in platform.capabilities if "float8" in name} == {fp8} - {None}
    assert {name for name in platform.capabilities if "wave" in name} == (
        {f"wave{wave}"} if wave else set()
    )
    assert CHIPS[chip][1]["name"] in platform.describe()
    assert "64 GiB" in platform.describe()


def test_memory_counts_what_the_allocator_keeps_as_free() -> None:
    platform = fake("H200")()
    driver = platform.runtime.module
    driver.used, driver.allocated = 10 << 30, 4 << 30
    assert (platform.memory().total, platform.memory().free) == (64 << 30, (64 - 10 + 6) << 30)
    assert platform.reset_peak_memory() == 4 << 30
    driver.peak = 5 << 30
    assert platform.peak_memory() == 5 << 30


def test_a_driver_that_does_not_tell_what_is_free() -> None:
    platform = fake("Max 1550")()
    driver = platform.runtime.module
    driver.allocated = 4 << 30

    def silent(device):
        raise RuntimeError("not implemented by this driver")

    driver.mem_get_info = silent
    assert platform.memory().free == 60 << 30


def test_weights_are_copied_from_host_memory_beside_the_work() -> None:
    platform = fake("H200")()
    calls = platform.runtime.module.calls
    with platform.queue():
        copies = platform.host_copies()
        memory = copies.allocate(8)
        memory.copy_(torch.arange(8))
        buffer = torch.zeros(8, dtype=torch.uint8)
        calls.clear()
        copy = copies.start(buffer, memory)
        assert calls == ["stream 3 waits for stream 1", "stream 3 records"]
        calls.clear()
        copies.wait(copy)
        assert calls == ["stream 1 waits for an event of stream 3"]
    assert buffer.tolist() == list(range(8))
    view = copies.mapped(memory)
    memory += 1
    assert view.tolist() == list(range(1, 9))
    assert view.data_ptr() == memory.data_ptr()
    assert fake("Max 1550")().host_copies().mapped(memory) is None


def test_what_is_sent_goes_in_order_and_what_is_fetched_beside_the_work() -> None:
    platform = fake("H200")()
    calls = platform.runtime.module.calls
    staging = platform.staging()
    with platform.queue():
        calls.clear()
        arrays = (np.arange(3, dtype=np.int64), np.ones((2, 2), np.int32), np.array([True, False]))
        sent = staging.send(arrays)
        assert calls == ["host waits", "stream 1 records"]
        assert all((one.numpy() == other).all() for one, other in zip(sent, arrays, strict=True))
        assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1
        calls.clear()
        fetched = platform.fetch(sent)
        assert calls == [
            "stream 2 waits for stream 1", *3 * ["used by stream 2"], "stream 2 records",
        ]  # fmt: skip
    calls.clear()
    assert fetched.wait()[0].tolist() == [0, 1, 2]
    assert calls == ["host waits"]


def test_host_buffers_are_not_filled_before_their_copy_is_done() -> None:
    platform = fake("H200")()
    staging, calls = platform.staging(), platform.runtime.module.calls
    for turn in range(9):
        calls.clear()
        staging.send((np.full(turn + 1, turn),))
        assert calls[0] == "host waits"


def test_steps_are_launched_behind_what_was_launched_before_them() -> None:
    platform = fake("H200")()
    calls = platform.runtime.module.calls
    with platform.queue():
        assert calls == ["stream 1 waits for default"]
        with platform.queue():
            assert len(calls) == 1


def test_memory_is_given_back_when_all_work_is_done() -> None:
    platform = fake("MI300X")()
    platform.empty_cache()
    assert platform.runtime.module.calls == ["synchronize", "empty_cache"]


@pytest.mark.parametrize(("chip", "mode"), [("H200", "thread_local"), ("Max 1550", None)])
def test_graphs_of_one_recorder_share_a_pool(chip, mode) -> None:
    platform = fake(chip)()
    driver = platform.runtime.module
    graphs = RuntimeGraphs(platform.runtime)
    settings = {} if mode is None else {"capture_error_mode": mode}
    with platform.queue():
        driver.calls.clear()
        for _ in range(2):
            graphs.begin()
            graphs.end()()
    assert driver.calls == 2 * [f"capture into pool 1 {settings}".strip(), "capture ends", "replay"]
    assert graphs.memory == 2 * driver.graph_bytes
    graphs.clear()
    assert graphs.memory == 0
    with platform.queue():
        graphs.begin()
        assert driver.calls[-1].startswith("capture into pool 2")
        with pytest.raises(RuntimeError, match="while a graph is captured"):
            platform.synchronize()
        graphs.end(failed=True)()
    assert driver.calls[-1] != "replay"


def test_a_place_without_its_memory() -> None:
    runtime = fake("H200").runtime
    whole = torch.arange(24.0).view(4, 6)
    part = whole[1:, 2:5]
    actual = runtime.unowned(part)
    assert torch.equal(actual, part)
    assert actual.stride() == part.stride()
    part.fill_(7)
    assert actual.eq(7).all()


@pytest.mark.exhaustive
@parametrize_sample("chip", ["H200", "MI300X", "Max 1550"], every=3)
def test_a_model_runs_on_it(chip, tmp_path) -> None:
    platform = type("Fake", (fake(chip),), {"name": "fake", "attention": ("sdpa",), "kernels": ()})
    folder = str(make_tiny(tmp_path / "tiny"))

    def tokens(device):
        with manager.using(PluginManager()) as plugins:
            plugins.register("platforms", "fake", platform)
            with LLM(
                folder, dtype="float32", max_model_len=64, enforce_eager=True, device=device,
                kernels="none", attention_backend="sdpa", num_gpu_blocks_override=32,
            ) as llm:  # fmt: skip
                prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [9] * 20)]
                params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
                outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    assert tokens("fake") == tokens("cpu")
    calls = platform.runtime.module.calls
    assert calls.count("stream 1 waits for default") > 6


def test_ranks_of_a_host_have_a_gpu_each() -> None:
    platform = fake("H200", count=2)()
    platform.take_share(1, 2)
    assert platform.runtime.module.current_device() == 1
    with pytest.raises(ConfigError, match=r"4 ranks on this host, which has 2 NVIDIA GPU\(s\)"):
        platform.take_share(3, 4)
