"""The cpu platform: memory within control groups, dtypes by instruction set, oneDNN's linears."""

from __future__ import annotations

import platform as host

import pytest
import torch

from modulm.contracts.platform import Memory
from modulm.plugins import manager
from modulm_platform_cpu.memory import keep_freed_memory, read_memory
from modulm_platform_cpu.onednn import OneDNN
from modulm_platform_cpu.platform import CpuPlatform

KIB = 1024


def machine(root, files):
    files = {"proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 800 kB\n", **files}
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return read_memory(root)


def test_without_limits_it_is_the_machine(tmp_path):
    assert machine(tmp_path, {}) == Memory(1000 * KIB, 800 * KIB)


def test_a_limit_of_the_own_group_counts_and_cached_pages_are_free(tmp_path):
    files = {
        "proc/self/cgroup": "0::/box/inner\n",
        "sys/fs/cgroup/box/memory.max": f"{500 * KIB}\n",
        "sys/fs/cgroup/box/memory.current": f"{300 * KIB}\n",
        "sys/fs/cgroup/box/memory.stat": f"anon 1\ninactive_file {100 * KIB}\n",
        "sys/fs/cgroup/box/inner/memory.max": "max\n",
        "sys/fs/cgroup/box/inner/memory.current": "1\n",
    }
    assert machine(tmp_path, files) == Memory(500 * KIB, 300 * KIB)


def test_version_one_of_control_groups(tmp_path):
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{400 * KIB}",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{450 * KIB}",
    }
    assert machine(tmp_path, files) == Memory(400 * KIB, 0)


def test_freed_memory_is_kept_with_glibc_only(monkeypatch):
    before = torch.arange(3_000_000)
    assert keep_freed_memory() == (host.libc_ver()[0] == "glibc")
    after = before + 1
    assert torch.equal(after - before, torch.ones_like(before))
    monkeypatch.setattr(host, "libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False


@pytest.mark.parametrize(
    ("features", "stored", "chosen"),
    [
        ({"avx2"}, "bfloat16", "bfloat16"),
        ({"avx2"}, "float16", "float32"),
        ({"avx512_bf16"}, "float16", "bfloat16"),
        ({"avx512_bf16", "avx512_fp16"}, "float16", "float16"),
        ({"avx512_bf16"}, "float64", "bfloat16"),
    ],
)
def test_dtype_follows_the_instruction_sets(features, stored, chosen):
    platform = CpuPlatform()
    platform.__dict__["features"] = frozenset(features)
    assert platform.choose_dtype(stored) == chosen


def test_onednn_is_left_out_where_it_cannot_compute_bf16(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    probe = OneDNN.probe(CpuPlatform())
    assert probe.score == 0
    assert "bfloat16" in probe.reason


def test_onednn_gives_what_a_plain_product_gives():
    probe = OneDNN.probe(CpuPlatform())
    if probe.score <= 0:
        pytest.skip(probe.reason)
    ops = OneDNN().ops()
    torch.manual_seed(0)
    weight, bias = torch.randn(48, 40).bfloat16(), torch.randn(48).bfloat16()
    packed = ops["pack_linear"](weight)
    assert torch.equal(ops["unpack_linear"](packed), weight)
    for rows in (1, 2, 33):
        x = torch.randn(rows, 40).bfloat16()
        expected = x.float() @ weight.float().T + bias.float()
        actual = ops["linear"](x, packed, bias).float()
        torch.testing.assert_close(actual, expected, atol=0.1, rtol=0.02)


def test_onednn_leaves_other_dtypes_to_torch():
    assert OneDNN().rejects("linear", dtype="float32")
    assert OneDNN().rejects("linear", dtype="bfloat16") is None


def test_cuda_says_why_it_is_not_here():
    driver = manager.current().load("platforms", "cuda")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert driver.probe().score == 0
    assert "GPU" in driver.probe().reason
