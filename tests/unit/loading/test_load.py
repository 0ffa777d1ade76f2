"""Loading: what does not fit is refused before a weight is read, naming file and name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from modulm.config import EngineConfig
from modulm.contracts.platform import Memory
from modulm.errors import (
    ArchitectureNotFound,
    CheckpointError,
    ConfigError,
    UnsupportedError,
)
from modulm.loading import load_model, open_checkpoint
from modulm.nn.weight_slots import Slot
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny


@pytest.fixture
def folder(tmp_path):
    return make_tiny(tmp_path, "LlamaForCausalLM")


@pytest.fixture
def sharded(tmp_path):
    return make_tiny(tmp_path, "LlamaForCausalLM", shards=2)


def load(path, **flags):
    settings = {"attention_backend": "sdpa", "kernels": ["none"], "dtype": "float32", **flags}
    config = EngineConfig.from_keywords(model=str(path), **settings)
    plugins = manager.current()
    platform = plugins.load("platforms", "cpu")()
    return load_model(config, open_checkpoint(config, plugins), platform, plugins)


def change_weights(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(folder, **keys):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def test_what_is_loaded_says_what_it_is(folder):
    loaded = load(folder)
    assert (loaded.dtype, loaded.vocabulary, loaded.max_model_len) == ("float32", 512, 256)
    (group,) = loaded.groups
    assert group.layers == (0, 1, 2)
    assert group.block_bytes == 3 * group.block_size * 2 * (16 + 16) * 4
    winners = {d.subject.partition(" (")[0]: d.winner for d in loaded.decisions}
    assert winners == {
        "model": "LlamaForCausalLM",
        "kernels": "torch",
        "quantization": "none",
        "attention": "sdpa",
        "loader": "safetensors",
    }


def test_windows_and_full_layers_are_groups_of_their_own(tmp_path):
    loaded = load(make_tiny(tmp_path, "Qwen2ForCausalLM"))
    assert [(g.layers, g.window) for g in loaded.groups] == [((0,), None), ((1, 2), 12)]
    whole = load(tmp_path, disable_sliding_window=True)
    assert [(g.layers, g.window) for g in whole.groups] == [((0, 1, 2), None)]
    assert whole.max_model_len == 12


def test_a_tied_head_is_the_embedding(tmp_path):
    model = load(make_tiny(tmp_path, "Qwen3ForCausalLM")).model
    assert torch.equal(model.head.packed, model.embed.weight)


def test_every_parameter_is_filled_and_nothing_is_on_the_meta_device(folder):
    assert not [n for n, p in load(folder).model.named_parameters() if p.is_meta]


def test_a_missing_weight_is_named(folder):
    change_weights(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing weights: model\.layers\.1\.mlp\.up_proj"):
        load(folder)


def test_an_unexpected_weight_is_named(folder):
    change_weights(folder, lambda t: t.update({"model.extra.weight": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"unexpected weights: model\.extra\.weight"):
        load(folder)


def test_a_wrong_shape_is_named_with_file_and_both_shapes(folder):
    change_weights(folder, lambda t: t.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight in model\.safetensors is \[63\], .* \[64\]"
    ):
        load(folder)


def test_a_config_that_does_not_fit_the_weights_is_refused(folder):
    change_config(folder, intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"wrong shapes: .*gate_proj"):
        load(folder)


@pytest.mark.parametrize("size", [4, 200, 5000])
def test_a_truncated_file_is_named(folder, size):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        load(folder)


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors missing"):
        load(sharded)


def test_an_index_that_leads_out_of_the_folder_is_refused(sharded):
    file = sharded / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="not a valid file name"):
        load(sharded)


def test_an_index_whose_shard_lacks_the_tensor_is_refused(sharded):
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00002.safetensors"
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.ghost should be in model-00001"):
        load(sharded)


def test_no_weights_at_all(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights that an installed loader reads"):
        load(folder)


def test_dummy_weights_need_only_a_config(folder):
    (folder / "model.safetensors").unlink()
    model = load(folder, load_format="dummy").model
    assert 0.01 < model.layers[0].mlp.down.packed.std().item() < 0.03


def test_a_folder_without_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: file not found"):
        load(tmp_path)


def test_a_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        load(folder)


def test_a_config_without_architecture(folder):
    change_config(folder, architectures=[])
    with pytest.raises(CheckpointError, match="architectures"):
        load(folder)


def test_an_architecture_that_nobody_offers(folder):
    change_config(folder, architectures=["FooForCausalLM"])
    with pytest.raises(ArchitectureNotFound, match=r"FooForCausalLM.*--model-impl transformers"):
        load(folder)


def test_overrides_replace_keys_of_config_json(folder):
    with pytest.raises(CheckpointError, match="hidden_size"):
        load(folder, hf_overrides={"hidden_size": -1})


def test_a_name_that_is_nothing():
    with pytest.raises(CheckpointError, match=r"'no_such_model' is neither a folder nor a hub id"):
        load("no_such_model")


def test_a_length_beyond_the_checkpoint_is_refused(folder):
    with pytest.raises(ConfigError, match=r"max_model_len: 1000 is more than 256"):
        load(folder, max_model_len=1000)
    assert load(folder, max_model_len=100).max_model_len == 100


def test_a_quantized_checkpoint_without_its_method(folder):
    change_config(folder, quantization_config={"quant_method": "squeeze"})
    with pytest.raises(UnsupportedError, match=r"squeeze: not installed"):
        load(folder)


def test_weights_that_do_not_fit_into_memory(folder, monkeypatch):
    driver = manager.current().load("platforms", "cpu")
    monkeypatch.setattr(driver, "memory", lambda self: Memory(total=2**20, free=1000))
    with pytest.raises(CheckpointError, match=r"the weights need .* GiB free"):
        load(folder)


def test_weights_that_fit_only_when_they_are_quantized(folder, monkeypatch):
    plain = load(folder).weight_bytes
    driver = manager.current().load("platforms", "cpu")
    free = plain // 2
    monkeypatch.setattr(driver, "memory", lambda self: Memory(total=2**30, free=free))
    with pytest.raises(CheckpointError, match="the weights need"):
        load(folder)
    assert load(folder, quantization="int8").weight_bytes == plain
    free = plain // 5
    with pytest.raises(CheckpointError, match="the weights need"):
        load(folder, quantization="int8")


def test_a_length_that_no_memory_holds_makes_no_table_of_that_length(folder, monkeypatch):
    """The cache of one token takes 768 bytes here: 2 MiB hold fewer than 3000 tokens."""
    change_config(folder, max_position_embeddings=10**8)
    driver = manager.current().load("platforms", "cpu")
    monkeypatch.setattr(driver, "memory", lambda self: Memory(total=2**21, free=2**21))
    loaded = load(folder)
    assert loaded.max_model_len == 10**8
    table = loaded.model.layers[0].attn.rotation.cos_sin
    assert 2**21 / 768 <= len(table) < 3000


def test_a_model_of_windows_needs_its_length_stated_if_that_is_absurd(tmp_path):
    make_tiny(tmp_path, "MistralForCausalLM")
    change_config(tmp_path, max_position_embeddings=10**8)
    with pytest.raises(ConfigError, match=r"max_model_len: the rotary angles of 100000000"):
        load(tmp_path)


def test_memory_is_asked_for_tensor_by_tensor(folder, monkeypatch):
    """When the first tensor arrives all other parameters are still without memory."""
    blank = []

    def fill(slot, part, tensor, device):
        blank.append(getattr(slot.module, slot.attribute).is_meta)
        original(slot, part, tensor, device)

    original = Slot.fill
    monkeypatch.setattr(Slot, "fill", fill)
    load(folder)
    fused = 3 * (2 + 1)  # per layer: k and v join q, up joins gate
    assert blank.count(False) == fused
    assert len(blank) == len(load_file(folder / "model.safetensors"))
