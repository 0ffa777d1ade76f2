"""Caches in fewer bits: the checkpoint's scales, scales per head, int4, layers left out."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import parametrize_sample

from modulm.cli.main import main
from modulm.errors import ModulmError
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_attention_sdpa.narrow_kv import pack, unpack

TOKENS = [5, 77, 130, 9, 301, 42, 8, 250, 12, 400, 33, 60, 71, 15, 2, 99]
BACKENDS = ["sdpa", "cpu_paged"]
LAYERS = 2

#: How libraries store the scales of a layer.
WRITTEN = {
    "compressed-tensors": ("{0}.k_scale", "{0}.v_scale"),
    "modelopt": ("{0}.k_proj.k_scale", "{0}.v_proj.v_scale"),
    "quark": ("{0}.k_proj.output_scale", "{0}.v_proj.output_scale"),
    "one for both": ("{0}.kv_scale",),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("plain"), "Qwen2ForCausalLM", num_hidden_layers=LAYERS)


def with_scales(folder, names, scales):
    """The checkpoint with `scales` ([] or [heads]) under names."""
    tensors = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        for name, scale in zip(names, scales, strict=False):
            tensors[name.format(f"model.layers.{layer}.self_attn")] = scale.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def scores(folder, **flags):
    session = Session(folder, device="cpu", dtype="float32", **flags)
    first = session.step({0: TOKENS[:9]})[0]
    return torch.cat([first, *(session.step({0: [token]})[0] for token in TOKENS[9:])])


@pytest.mark.parametrize("backend", BACKENDS)
@parametrize_sample("way", WRITTEN, every=2)
def test_scales_of_the_checkpoint(tmp_path, plain, backend, way):
    """Powers of two under which nothing is cut: the same bits as without scales but for what falls
    out of e4m3's range. A scale far too large costs digits, so that it is seen to be used."""
    exact = scores(plain, attention_backend=backend)
    errors = []
    for size in (2.0**-3, 2.0**9):
        scale = torch.tensor(size)
        folder = make_tiny(tmp_path / str(size), "Qwen2ForCausalLM", num_hidden_layers=LAYERS)
        with_scales(folder, WRITTEN[way], (scale, scale))
        flags = {"attention_backend": backend, "kv_cache_dtype": "fp8"}
        errors.append((scores(folder, **flags) - exact).abs().mean().item())
    assert 0 < errors[0] < 0.5 < errors[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_by_head(tmp_path, backend):
    """Keys of one head far beyond e4m3: with a scale of its own it keeps its digits."""
    folder = make_tiny(tmp_path, "Qwen2ForCausalLM", num_hidden_layers=LAYERS)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        path = f"model.layers.{layer}.self_attn.v_proj"
        size = tensors[f"{path}.weight"].shape[0] // 2
        for end in ("weight", "bias"):
            tensors[f"{path}.{end}"][size:] *= 2.0**12
        out = tensors[f"model.layers.{layer}.self_attn.o_proj.weight"]
        out[:, out.shape[1] // 2 :] *= 2.0**-12
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    exact = scores(folder, attention_backend=backend)
    flags = {"attention_backend": backend, "kv_cache_dtype": "fp8_e4m3"}
    cut = (scores(folder, **flags) - exact).abs().mean()
    names = WRITTEN["compressed-tensors"]
    with_scales(folder, names, (torch.ones(2), torch.tensor([1.0, 2.0**12])))
    assert (scores(folder, **flags) - exact).abs().mean() < min(0.5, cut / 2)


def rescaled(folder, by):
    """The model whose keys are so many times larger, and whose queries smaller; values alike."""
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        part = name.split(".")[-2]
        if part in ("k_proj", "v_proj"):
            tensors[name] = tensors[name] * by
        elif part in ("q_proj", "o_proj"):
            tensors[name] = tensors[name] / by
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@parametrize_sample(
    ("model_impl", "backend"),
    [(each, backend) for backend in BACKENDS for each in ("auto", "transformers")],
    every=3,
)
def test_scales_of_a_first_step(tmp_path, backend, model_impl):
    """Keys and values far outside of e4m3's range, with no scales in the checkpoint."""
    flags = {"attention_backend": backend, "model_impl": model_impl}
    plain = make_tiny(tmp_path / "plain", "LlamaForCausalLM", num_hidden_layers=LAYERS)
    folder = rescaled(
        make_tiny(tmp_path / "far", "LlamaForCausalLM", num_hidden_layers=LAYERS), 2.0**14
    )
    exact = scores(plain, **flags)
    flags["kv_cache_dtype"] = "fp8"
    cut = (scores(folder, **flags) - exact).abs().mean()
    logprobs = scores(folder, **flags, calculate_kv_scales=True)
    assert (logprobs - exact).abs().mean() < min(0.3, cut / 4)
    # As 200 and 100 of 448 for the largest of the first step, the checkpoint's own put aside.
    wrong = torch.tensor(2.0**-9)
    with_scales(folder, WRITTEN["compressed-tensors"], (wrong, wrong))
    again = scores(folder, **flags, calculate_kv_scales=True)
    assert torch.equal(again, logprobs)


@parametrize_sample("way", ["compressed-tensors", "modelopt"], every=2)
def test_scales_of_the_checkpoint_for_code_of_transformers(tmp_path, way):
    exact = make_tiny(tmp_path / "plain", "LlamaForCausalLM", num_hidden_layers=LAYERS)
    folder = rescaled(
        make_tiny(tmp_path / "far", "LlamaForCausalLM", num_hidden_layers=LAYERS), 2.0**14
    )
    scale = torch.tensor(2.0**11)
    with_scales(folder, WRITTEN[way], (scale, scale))
    flags = {"kv_cache_dtype": "fp8", "attention_backend": "sdpa"}
    native, bridged = (scores(folder, **flags, model_impl=m) for m in ("auto", "transformers"))
    torch.testing.assert_close(native, bridged, rtol=0, atol=2e-3)
    assert (native - scores(exact, attention_backend="sdpa")).abs().mean() < 0.3
    plain = scores(folder, attention_backend="sdpa", model_impl="transformers")
    torch.testing.assert_close(plain, scores(exact, attention_backend="sdpa"), rtol=0, atol=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scales_of_latent_attention(tmp_path, backend):
    """One for keys, of which values are a part: the checkpoint's, or found in the first step."""
    flags = {"attention_backend": backend}
    plain, folder = (
        make_tiny(tmp_path / n, "DeepseekV2ForCausalLM", num_hidden_layers=LAYERS) for n in "ab"
    )
    tensors = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        path = f"model.layers.{layer}.self_attn"
        tensors[f"{path}.kv_a_layernorm.weight"] *= 2.0**10
        tensors[f"{path}.kv_b_proj.weight"] *= 2.0**-10
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    exact = scores(plain, **flags)
    flags["kv_cache_dtype"] = "fp8"
    cut = (scores(folder, **flags) - exact).abs().mean()
    logprobs = scores(folder, **flags, calculate_kv_scales=True)
    assert (logprobs - exact).abs().mean() < min(0.3, cut / 4)
    scale = torch.tensor(2.0**3)
    for way in ("{0}.k_scale", "{0}.kv_a_proj_with_mqa.k_scale"):
        checkpoint = make_tiny(
            tmp_path / way[4:], "DeepseekV2ForCausalLM", num_hidden_layers=LAYERS
        )
        save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
        with_scales(checkpoint, (way,), (scale,))
        assert (scores(checkpoint, **flags) - exact).abs().mean() < min(0.3, cut / 4)


def test_scales_are_found_for_eight_bit_floats_alone(plain):
    with pytest.raises(ModulmError, match="calculate_kv_scales.*needs --kv-cache-dtype fp8"):
        scores(plain, attention_backend="sdpa", calculate_kv_scales=True)


def test_both_backends_round_alike(tmp_path):
    folder = make_tiny(tmp_path, "Qwen2ForCausalLM", num_hidden_layers=LAYERS)
    with_scales(folder, WRITTEN["modelopt"], (torch.tensor(0.02), torch.tensor(0.01)))
    logprobs = [scores(folder, attention_backend=b, kv_cache_dtype="fp8") for b in BACKENDS]
    assert (logprobs[0] - logprobs[1]).abs().mean() < 0.1


def test_int4_and_int8_against_the_numbers_they_stand_for():
    torch.manual_seed(0)
    x = torch.randn(6, 3, 64)
    for kind, top in (("int8", 127), ("int4", 7)):
        scale = x.abs().amax(-1, keepdim=True) / top
        wanted = (x / scale).round() * scale
        decoded = unpack(pack(x, kind), kind, torch.float32)
        torch.testing.assert_close(decoded, wanted)
        assert pack(x, kind).shape[-1] == (64 if kind == "int8" else 32) + 4


def test_int4_takes_a_quarter_and_stays_near(plain):
    exact = scores(plain, attention_backend="sdpa")
    errors = {}
    for kind in ("int8_per_token_head", "int4_per_token_head"):
        logprobs = scores(plain, attention_backend="sdpa", kv_cache_dtype=kind)
        errors[kind] = (logprobs - exact).abs().mean().item()
    assert 0 < errors["int8_per_token_head"] < 0.1 < errors["int4_per_token_head"] < 1.5


def test_layers_that_are_left_out(plain):
    exact = scores(plain, attention_backend="sdpa")
    flags = {"attention_backend": "sdpa", "kv_cache_dtype": "int4_per_token_head"}
    all_but = scores(plain, **flags, kv_cache_dtype_skip_layers=["0"])
    none = scores(plain, **flags, kv_cache_dtype_skip_layers=["0", "1"])
    assert torch.equal(none, exact)
    assert not torch.equal(all_but, exact)
    assert not torch.equal(all_but, scores(plain, **flags))


def test_windows_that_are_left_out(tmp_path, capsys):
    folder = make_tiny(tmp_path, "Gemma2ForCausalLM")
    flags = ["--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "sliding_window"]
    with pytest.raises(SystemExit):
        main(["explain", str(folder), "--dtype", "bfloat16", *flags])
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("attention (")
    ]
    narrow_by_window = {"window" in line: "float8" in line for line in lines}
    assert narrow_by_window == {True: False, False: True}


def test_what_a_kernel_cannot_keep_is_refused_by_name(plain):
    with pytest.raises(ModulmError, match="kv_cache_dtype.*cpu_paged.*not int4"):
        scores(plain, attention_backend="cpu_paged", kv_cache_dtype="int4_per_token_head")


def test_scales_that_fit_no_head_are_refused(tmp_path):
    folder = make_tiny(tmp_path, "Qwen2ForCausalLM", num_hidden_layers=LAYERS)
    with_scales(folder, WRITTEN["compressed-tensors"], (torch.ones(3), torch.ones(3)))
    with pytest.raises(ModulmError, match=r"self_attn\.k_scale.*\[3\]"):
        scores(folder, attention_backend="sdpa", kv_cache_dtype="fp8")
