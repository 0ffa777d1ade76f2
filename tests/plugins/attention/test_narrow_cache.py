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
from modulm_attention_sdpa.narrow_kv import pack, packed_width, unpack

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


@pytest.mark.parametrize(
    ("kind", "width"),
    [("fp8_per_token_head", 68), ("nvfp4", 36), ("nvfp4_4over6", 36)],
)
def test_formats_with_scales_stay_within_half_a_step(kind, width):
    torch.manual_seed(0)
    x = torch.randn(6, 3, 64)
    x[0] = 0
    packed = pack(x, kind)
    assert packed.shape[-1] == packed_width(kind, 64) == width
    error = (unpack(packed, kind, torch.float32) - x).abs()
    if kind == "fp8_per_token_head":  # three bits after the point, or a step of 2^-9
        scale = x.abs().amax(-1, keepdim=True) / 448
        assert (error <= torch.maximum(x.abs() / 16, scale * 2**-10) * 1.001).all()
        return
    # Of e2m1 the widest step is 2, from 4 to 6 scales; e4m3 scales are off by a sixteenth.
    most = x.unflatten(-1, (4, 16)).abs().amax(-1, keepdim=True).expand(6, 3, 4, 16).flatten(-2)
    assert (error <= most / 6 * (1 + 1 / 16) + most / 16).all()
    if kind == "nvfp4_4over6":
        plain = (unpack(pack(x, "nvfp4"), "nvfp4", torch.float32) - x).square()
        assert error.square().sum() < plain.sum()


def test_backends_keep_scaled_e4m3_alike(plain):
    flags = {"kv_cache_dtype": "fp8_per_token_head"}
    exact = scores(plain, attention_backend="sdpa")
    logprobs = [scores(plain, attention_backend=backend, **flags) for backend in BACKENDS]
    assert 0 < (logprobs[0] - exact).abs().mean() < 0.2
    assert (logprobs[0] - logprobs[1]).abs().mean() < 0.05


def test_latents_in_the_bytes_of_flashmla():
    """Positions and values by hand: 512 e4m3, 4 fp32 scales, 64 bf16; and its form in 4 bits."""
    torch.manual_seed(0)
    x = torch.randn(3, 1, 576)
    packed = pack(x, "fp8_ds_mla")
    assert packed.shape == (3, 1, 656)
    scales = packed[..., 512:528].contiguous().view(torch.float32)
    torch.testing.assert_close(scales, x[..., :512].unflatten(-1, (4, 128)).abs().amax(-1) / 448)
    first = packed[..., :128].contiguous().view(torch.float8_e4m3fn).float() * scales[..., :1]
    torch.testing.assert_close(first, x[..., :128], rtol=1 / 16, atol=1e-3)
    rotated = packed[..., 528:].contiguous().view(torch.bfloat16)
    assert torch.equal(rotated, x[..., 512:].bfloat16())
    decoded = unpack(packed, "fp8_ds_mla", torch.float32)
    torch.testing.assert_close(decoded, x, rtol=1 / 16, atol=1e-3)
    packed = pack(x, "nvfp4_ds_mla")
    assert packed.shape == (3, 1, 352)
    group = 5
    scale = packed[..., 320 + 8 * (group % 4) + group // 4].contiguous().view(torch.float8_e4m3fn)
    numbers = x[..., 80:96]
    torch.testing.assert_close(scale.float(), numbers.abs().amax(-1) / 6, rtol=1 / 16, atol=0)
    decoded = unpack(packed, "nvfp4_ds_mla", torch.float32)
    assert ((decoded - x)[..., 80:96].abs() <= scale.float()[..., None] * 1.5).all()
    torch.testing.assert_close(decoded[..., 512:], x[..., 512:], rtol=1 / 16, atol=2**-9)


def test_a_latent_model_in_the_bytes_of_flashmla(tmp_path):
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    folder = make_tiny(tmp_path, "DeepseekV3ForCausalLM", num_hidden_layers=LAYERS, **sizes)
    exact = scores(folder, attention_backend="sdpa")
    for kind, most in (("fp8_ds_mla", 0.1), ("nvfp4_ds_mla", 1.0)):
        logprobs = scores(folder, attention_backend="sdpa", kv_cache_dtype=kind)
        assert 0 < (logprobs - exact).abs().mean() < most


def test_names_without_a_published_format_are_refused(plain):
    with pytest.raises(ModulmError, match="turboquant_k8v4 is defined by vLLM's kernels only"):
        scores(plain, kv_cache_dtype="turboquant_k8v4")
    with pytest.raises(ModulmError, match="latents of 512"):
        scores(plain, kv_cache_dtype="fp8_ds_mla")


def test_a_format_of_no_backend_is_refused_with_those_that_each_has(plain):
    """The flag takes any name, since packages bring backends with formats of their own."""
    message = "kv_cache_dtype: .*cpu_paged: supports KV caches in bfloat16, .*int8, not bits"
    with pytest.raises(ModulmError, match=message):
        scores(plain, kv_cache_dtype="bits")


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
