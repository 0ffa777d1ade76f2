"""A quantized format with everything that published ones have, from disk to the right numbers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from modulm.errors import CheckpointError, UnsupportedError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.formats import FakeFormat, encode, stored_weight, write_format
from modulm.testing.session import Session

TOKENS = [5, 77, 130, 9, 301, 42, 8, 250, 12, 400, 33]
LINEAR = r"layers\..*proj\.weight$"


@pytest.fixture(autouse=True)
def offered():
    plugins = manager.PluginManager()
    plugins.register("quantization", "fake", FakeFormat)
    with manager.using(plugins):
        yield


def folders(folder, architecture="LlamaForCausalLM", layers=LINEAR, **shape):
    plain = make_tiny(folder / "plain", architecture, **shape)
    write_format(plain, folder / "coded", layers)
    return plain, folder / "coded"


def logprobs(folder):
    session = Session(folder, device="cpu", dtype="float32", block_size=16, kernels=["none"])
    return session.step({0: TOKENS})[0]


def change(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_fused_parts_with_scales_of_their_own(tmp_path):
    """576 outputs in blocks of 128: five scales in the file, and the next part starts inside."""
    plain, coded = folders(tmp_path, intermediate_size=576)
    stored = load_file(coded / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.block_scale_inv"].shape == (5, 2)
    scales = [stored[f"model.layers.0.self_attn.{n}_proj.scale"].item() for n in "qkv"]
    assert len(set(scales)) > 1
    assert torch.equal(logprobs(coded), logprobs(plain))


@pytest.mark.parametrize("scales", [2, 1])
def test_parts_stored_as_one(tmp_path, scales):
    """Blocks run across the boundary of the parts; the scale is one of each part, or of both."""
    plain, coded = folders(tmp_path, intermediate_size=576)
    whole = {}
    for i in range(3):
        exponent = torch.zeros(64, dtype=torch.int32)
        whole[f"model.layers.{i}.mlp"] = encode(1152, 64, exponent, parts=scales)

    def fuse(tensors):
        for path, stored in whole.items():
            for name in [n for n in tensors if n.startswith((f"{path}.up", f"{path}.gate"))]:
                del tensors[name]
            tensors |= {f"{path}.gate_up_proj.{key}": value for key, value in stored.items()}

    def say(tensors):
        for path, stored in whole.items():
            weight = stored_weight(stored, (1152 // scales,) * scales)
            for name, half in zip(("gate", "up"), weight.chunk(2), strict=True):
                tensors[f"{path}.{name}_proj.weight"] = half.contiguous()

    change(coded, fuse)
    change(plain, say)
    assert torch.equal(logprobs(coded), logprobs(plain))


def test_stacks_of_experts(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 160}
    plain, coded = folders(
        tmp_path, "MixtralForCausalLM", r"(layers\..*proj|experts\.\d+\.w\d)\.weight$", **shape
    )
    assert any(".experts.1.w1.block_scale_inv" in n for n in load_file(coded / "model.safetensors"))
    assert torch.equal(logprobs(coded), logprobs(plain))


def test_what_parts_share_must_be_equal(tmp_path):
    _, coded = folders(tmp_path)
    name = "model.layers.1.self_attn.v_proj.exponent"
    change(coded, lambda tensors: tensors[name].add_(1))
    message = rf"{name} in model\.safetensors: .*differs from .* other parts"
    with pytest.raises(CheckpointError, match=message):
        logprobs(coded)


def test_a_floor_divided_grid_of_scales_is_refused(tmp_path):
    _, coded = folders(tmp_path, intermediate_size=576)
    name = "model.layers.0.mlp.up_proj.block_scale_inv"
    change(coded, lambda tensors: tensors.update({name: tensors[name][:4].clone()}))
    message = rf"{name} in model\.safetensors is \[4, 2\], .* \[5, 2\]"
    with pytest.raises(CheckpointError, match=message):
        logprobs(coded)


def test_a_missing_scale_is_named(tmp_path):
    _, coded = folders(tmp_path)
    name = "model.layers.0.self_attn.k_proj.scale"
    change(coded, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"missing weights: {name}"):
        logprobs(coded)


def test_a_layer_quantized_in_part_is_refused(tmp_path, monkeypatch):
    _, coded = folders(tmp_path)
    monkeypatch.setattr(FakeFormat, "skips", lambda self, name: name.endswith("k_proj"))
    with pytest.raises(UnsupportedError, match=r"q_proj.*k_proj.*fake for some parts"):
        logprobs(coded)


def test_dummy_weights_of_a_format(tmp_path):
    _, coded = folders(tmp_path)
    (coded / "model.safetensors").unlink()
    session = Session(coded, device="cpu", load_format="dummy", kernels=["none"])
    assert session.step({0: TOKENS})[0].shape == (len(TOKENS), 512)
