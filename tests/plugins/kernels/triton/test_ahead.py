"""Kernels are compiled for GPUs that are not there, and fit into their shared memory."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import pytest
import torch
from samples import parametrize_sample

#: Bytes of shared memory that a block may have.
MOST = {
    "cuda:90": 232_448,
    "hip:gfx942": 65_536,
    "cuda:100": 232_448,
    "hip:gfx950": 163_840,
}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


#: DeepSeek V3.2's attention.
SPARSE = {
    **QWEN3,
    "model_type": "deepseek_v32",
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
}
_SPARSE_KERNELS = {"_score", "_select", "_selected", "_merge", "_prompt"}
#: Sizes, kernels, and the format of the cache.
MODELS = {
    "qwen3": (
        QWEN3,
        {"_rms_norm", "_qkv_prepare", "_prompt", "_split", "_rms_norm_rounded", "_rms_norm_blocks"},
        "",
    ),
    "deepseek_v32": (SPARSE, _SPARSE_KERNELS, ""),
    "deepseek_v32, fp8_ds_mla": (SPARSE, {*_SPARSE_KERNELS, "_write"}, "fp8_ds_mla"),
    "deepseek_v32, nvfp4_ds_mla": (SPARSE, {*_SPARSE_KERNELS, "_write"}, "nvfp4_ds_mla"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", MODELS)
@parametrize_sample("target", MOST, every=2)
def test_compiled_without_the_gpu(target, model, tmp_path):
    table, expected, kept = MODELS[model]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(table))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "kept"), "TRITON_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "modulm_kernels_triton.ahead", config, "--target", target]
    command += ["--also", "low_precision"] if model == "qwen3" else ["--also"]
    command += [] if "hip" in target else ["adapters"]
    command += ["--kv-cache-dtype", kept] if kept else []
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=3000
    )
    assert done.returncode == 0, done.stderr
    *kernels, last = done.stdout.splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in kernels}
    assert expected <= sizes.keys()
    assert ("_down" in sizes) == ("hip" not in target)
    assert max(sizes.values()) <= MOST[target]
    folder = last.split(" in ")[1]
    binary = "hsaco" if "hip" in target else "cubin"
    assert any(name.endswith(binary) for _, _, names in os.walk(folder) for name in names)


def test_kinds_are_those_that_can_be_named():
    from modulm_kernels_triton import ahead, kinds

    source = inspect.getsource(ahead.main)
    assert all(f'"{kind.__name__}"' in source for kind in kinds.KINDS)


def test_sizes_of_a_config():
    from modulm_kernels_triton.ahead import Sizes

    plain = Sizes.of(QWEN3)
    assert (plain.heads, plain.kv_heads, plain.head_dim, plain.normed) == (16, 8, 128, True)
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "model_type": "deepseek_v3"}
    sizes = Sizes.of({**QWEN3, **latent}, "float8_e4m3fn")
    assert (sizes.kv_heads, sizes.head_dim, sizes.normed) == (1, 576, False)
    assert sizes.kv_dtype == torch.float8_e4m3fn
    inside = Sizes.of({"text_config": {**QWEN3, "sliding_window": 4096}})
    assert inside.window == 4096


def test_interpreted_kernels_are_not_compiled(device):
    from modulm_kernels_triton.ahead import compiling_for

    if device.type != "cpu":
        pytest.skip("kernels are compiled here")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"), compiling_for("cuda", "90"):
        pass
