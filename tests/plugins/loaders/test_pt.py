"""pytorch_model.bin: the numbers that were stored, mapped and not copied; nothing of it runs."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modulm.errors import CheckpointError
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session

TOKENS = [5, 77, 130, 9, 301]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture
def folder(tmp_path, tiny):
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def logprobs(path):
    session = Session(path, device="cpu", attention_backend="sdpa", kernels=["none"])
    return session.step({0: TOKENS})[0]


def pickled(folder, **settings):
    """The same weights as pytorch_model.bin alone."""
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin", **settings)
    (folder / "model.safetensors").unlink()
    return folder


def sharded(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"pytorch_model-{i:05d}-of-00002.bin" for i in (1, 2)]
    where = {name: files[i % 2] for i, name in enumerate(tensors)}
    for file in files:
        torch.save({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index, where


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "before torch 1.6"])
def test_the_same_numbers_as_from_safetensors(folder, archive):
    expected = logprobs(folder)
    pickled(folder, _use_new_zipfile_serialization=archive)
    assert torch.equal(logprobs(folder), expected)


def test_shards_by_their_index(folder):
    expected = logprobs(folder)
    sharded(folder)
    assert torch.equal(logprobs(folder), expected)


def test_tensors_are_mapped_and_not_held(folder):
    """What the loader gives lies in the file: no memory of its own, whatever the size."""
    loader = manager.current().load("loaders", "pt")(pickled(folder))
    assert set(loader.index()) == {name for name, _ in loader.read()}
    for _, tensor in loader.read():
        assert not tensor.untyped_storage().resizable()


def test_safetensors_come_first(folder):
    torch.save({}, folder / "pytorch_model.bin")
    session = Session(folder, device="cpu", attention_backend="sdpa")
    decision = next(d for d in session.loaded.decisions if d.subject == "loader")
    assert decision.winner == "safetensors"


class Runs:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (self.file,)


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "plain pickle"])
def test_nothing_of_a_pickle_runs(folder, tmp_path, archive):
    pickled(folder)
    file = folder / "pytorch_model.bin"
    table = {"model.norm.weight": Runs(str(tmp_path / "pwned"))}
    if archive:
        torch.save(table, file)
    else:
        file.write_bytes(pickle.dumps(table))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: more than a table of tensors"):
        logprobs(folder)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model.norm.weight": 3}, "'model.norm.weight': a plain tensor is expected, not a int"),
        ({3: torch.zeros(2)}, "3: a plain tensor is expected"),
        ([torch.zeros(2)], "a table of tensors is expected, not list"),
        ({"model": {"norm.weight": torch.zeros(2)}}, "'model': a plain tensor is expected"),
        ({"model.norm.weight": torch.zeros(2).to_sparse()}, "a plain tensor is expected"),
        ({"model.extra": torch.zeros(2)}, "unexpected weights: model.extra"),
    ],
)
def test_what_is_no_table_of_tensors_is_named(folder, content, message):
    pickled(folder)
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        logprobs(folder)


@pytest.mark.parametrize("size", [0, 4, 1000, 100_000, -1])
def test_a_damaged_file_is_named(folder, size):
    file = pickled(folder) / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: "):
        logprobs(folder)


def test_a_missing_shard_is_named(folder):
    sharded(folder)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-00002-of-00002\.bin missing"):
        logprobs(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.ghost": "pytorch_model-00001-of-00002.bin"}, "model.ghost should be in"),
        ({"model.ghost": "../elsewhere.bin"}, "is not a valid file name"),
        ({"model.ghost": "training_args.bin"}, "is not a valid file name"),
        ({"model.ghost": 3}, "3 is not a valid file name"),
    ],
)
def test_an_index_that_is_wrong_is_named(folder, change, message):
    index, where = sharded(folder)
    index.write_text(json.dumps({"weight_map": {**where, **change}}))
    with pytest.raises(CheckpointError, match=rf"index\.json: .*{message}"):
        logprobs(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}", "\xff"])
def test_an_index_that_is_none_is_named(folder, text):
    index, _ = sharded(folder)
    index.write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"index\.json: weight_map"):
        logprobs(folder)


def test_a_tensor_in_two_shards_is_named(folder):
    index, where = sharded(folder)
    second = folder / "pytorch_model-00002-of-00002.bin"
    name = next(n for n, file in where.items() if file != second.name)
    torch.save({**torch.load(second, weights_only=True), name: torch.zeros(2)}, second)
    del where[name]
    index.write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match=f"{name} is both in"):
        logprobs(folder)


def test_the_loader_has_no_options(folder):
    pickled(folder)
    with pytest.raises(CheckpointError, match=r"no options, got \['speed'\]"):
        Session(folder, device="cpu", model_loader_extra_config={"speed": 3})
