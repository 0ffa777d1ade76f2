"""Loaders beside safetensors: the numbers that safetensors give, and what is damaged is named."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tensorizer import EncryptionParams, TensorSerializer

from modulm.config import EngineConfig
from modulm.errors import ConfigError, ModulmError
from modulm.loading import resolve_checkpoint
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_command_save_sharded.command import command as save_sharded

TOKENS = [5, 77, 130, 9, 301]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture
def folder(tmp_path, tiny):
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture(scope="module")
def expected(tiny):
    return logprobs(tiny)


def logprobs(path, **flags):
    flags = {"device": "cpu", "attention_backend": "sdpa", "kernels": ["none"], **flags}
    return Session(path, **flags).step({0: TOKENS})[0]


def weights(folder):
    """The tensors of the checkpoint, whose file is gone then."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    return tensors


def pickled(folder):
    torch.save(weights(folder), folder / "pytorch_model.bin")
    return folder


def tensorized(folder, **settings):
    writer = TensorSerializer(str(folder / "model.tensors"), **settings)
    writer.write_state_dict(weights(folder))
    writer.close()
    return folder


def sharded(source, out, *options):
    CliRunner().invoke(save_sharded, [str(source), str(out), *options], catch_exceptions=False)
    return out


# npcache


def test_npcache_gives_the_same_numbers_with_and_without_a_cache(folder, expected):
    pickled(folder)
    assert torch.equal(logprobs(folder, load_format="npcache"), expected)
    cache = folder / "np"
    names = json.loads((cache / "weight_names.json").read_text())
    assert {f"{name}.npy" for name in names} == {file.name for file in cache.glob("*.npy")}
    whole = json.loads((cache / "cache.json").read_text())
    (folder / "pytorch_model.bin").rename(folder / "away")
    (folder / "away").rename(folder / "pytorch_model.bin")
    loader = manager.current().load("loaders", "npcache")(folder)
    assert {stored.file for stored in loader.index().values()} == {f"np/{n}.npy" for n in names}
    assert whole["dtypes"] == {name: stored.dtype for name, stored in loader.index().items()}
    assert torch.equal(logprobs(folder, load_format="npcache"), expected)


def test_npcache_keeps_what_numpy_lacks(folder):
    tensors = {
        "half": torch.randn(3, 4).bfloat16(),
        "byte": torch.randn(4).to(torch.float8_e4m3fn),
        "mask": torch.tensor([True, False]),
        "one": torch.tensor(3),
    }
    torch.save(tensors, folder / "pytorch_model.bin")
    driver = manager.current().load("loaders", "npcache")
    for _ in range(2):
        cached = {name: tensor.clone() for name, tensor in driver(folder).read()}
        assert cached.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert cached[name].dtype == tensor.dtype
            assert torch.equal(cached[name].double(), tensor.double())
    assert (folder / "np" / "half.npy").exists()


def test_npcache_of_vllm_has_names_alone(folder, expected):
    tensors = weights(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "np").mkdir()
    for name, tensor in tensors.items():
        np.save(folder / "np" / f"{name}.npy", tensor.float().numpy())
    (folder / "np" / "weight_names.json").write_text(json.dumps(list(tensors)))
    actual = logprobs(folder, load_format="npcache")
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_npcache_is_made_anew_when_the_checkpoint_changes(folder, expected):
    pickled(folder)
    logprobs(folder, load_format="npcache")
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    other = {name: tensor * 1.5 for name, tensor in tensors.items()}
    torch.save(other, folder / "pytorch_model.bin")
    os.utime(folder / "pytorch_model.bin", (1, 1))
    changed = logprobs(folder, load_format="npcache")
    assert not torch.equal(changed, expected)
    assert torch.equal(logprobs(folder, load_format="npcache"), changed)
    assert [file.name for file in folder.iterdir() if file.name.startswith("np")] == ["np"]


def test_npcache_of_another_release_is_made_anew(folder, expected):
    pickled(folder)
    logprobs(folder, load_format="npcache")
    notes = folder / "np" / "cache.json"
    written = json.loads(notes.read_text())
    notes.write_text(json.dumps({**written, "version": written["version"] + 1, "dtypes": 7}))
    assert torch.equal(logprobs(folder, load_format="npcache"), expected)
    assert json.loads(notes.read_text()) == written


class Runs:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (self.file,)


NPCACHE_BAD = {
    "cut short": (lambda f, t: f.write_bytes(f.read_bytes()[:-8]), r"norm\.weight\.npy: not a num"),
    "no numpy": (lambda f, t: f.write_bytes(b"x" * 99), r"norm\.weight\.npy: not a numpy file"),
    "gone": (lambda f, t: f.unlink(), r"norm\.weight\.npy: not a numpy file"),
    "a pickle": (
        lambda f, t: np.save(f, np.array([Runs(str(t / "ran"))], dtype=object), allow_pickle=True),
        r"norm\.weight\.npy: not a numpy file of numbers",
    ),
    "a bare pickle": (
        lambda f, t: f.write_bytes(pickle.dumps(Runs(str(t / "ran")))), r"norm\.weight\.npy",
    ),
    "another shape": (
        lambda f, t: np.save(f, np.zeros(3, np.float32)), r"norm\.weight in .*norm\.weight\.npy",
    ),
    "names that lead elsewhere": (
        lambda f, t: (f.parent / "weight_names.json").write_text('["../../etc/x"]'),
        r"not a valid file",
    ),
    "no list of names": (
        lambda f, t: (f.parent / "weight_names.json").write_text('{"a": 1}'), r"a list of names",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NPCACHE_BAD)
def test_what_is_wrong_with_a_numpy_file_is_said(folder, tmp_path, what):
    pickled(folder)
    logprobs(folder, load_format="npcache")
    spoil, message = NPCACHE_BAD[what]
    spoil(folder / "np" / "model.norm.weight.npy", tmp_path)
    with pytest.raises(ModulmError, match=message):
        logprobs(folder, load_format="npcache")
    assert not (tmp_path / "ran").exists()


# tensorizer


def test_tensorizer_gives_the_same_numbers(folder, expected):
    assert torch.equal(logprobs(tensorized(folder)), expected)  # by itself: nothing else is there


@pytest.mark.parametrize("nested", [False, True])
def test_tensorizer_by_its_uri_with_a_key(folder, expected, tmp_path, nested):
    key = EncryptionParams.random()
    tensorized(folder, encryption=key)
    (tmp_path / "key").write_bytes(key.key)
    (folder / "model.tensors").rename(tmp_path / "other.tensors")
    table = {
        "tensorizer_uri": str(tmp_path / "other.tensors"),
        "encryption_keyfile": str(tmp_path / "key"),
        "verify_hash": True,
    }
    options = {"tensorizer_config": table} if nested else table
    actual = logprobs(folder, load_format="tensorizer", model_loader_extra_config=options)
    assert torch.equal(actual, expected)


TENSORIZER_BAD = {
    "cut short": (lambda f: f.write_bytes(f.read_bytes()[:-99]), {}, r"tensors: .*truncated: "),
    "cut in the header": (lambda f: f.write_bytes(f.read_bytes()[:200]), {}, r"not a tensor"),
    "nothing": (lambda f: f.write_bytes(b""), {}, r"not a tensorizer file"),
    "gone": (lambda f: f.unlink(), {}, r"model\.tensors: not a tensorizer file"),
    "of vLLM's layers": (lambda f: None, {"vllm_tensorized": True}, r"written by vLLM"),
    "an unknown key": (
        lambda f: None,
        {"uri": "x"},
        r"model_loader_extra_config: unknown option uri",
    ),
    "a key of the wrong type": (lambda f: None, {"num_readers": "2"}, r"num_readers"),
}


@pytest.mark.parametrize("what", TENSORIZER_BAD)
def test_what_is_wrong_with_a_tensorized_file_is_said(folder, what):
    spoil, options, message = TENSORIZER_BAD[what]
    tensorized(folder)
    spoil(folder / "model.tensors")
    with pytest.raises(ModulmError, match=message):
        logprobs(folder, load_format="tensorizer", model_loader_extra_config=options)


def test_what_vllm_marked_is_refused(folder):
    tensors = {**weights(folder), "vllm_tensorized_marker": torch.tensor(1)}
    writer = TensorSerializer(str(folder / "model.tensors"))
    writer.write_state_dict(tensors)
    writer.close()
    with pytest.raises(ModulmError, match="written by vLLM from its own fused layers"):
        logprobs(folder)


# The streamer of Run:ai


def test_the_streamer_gives_the_same_numbers(folder, expected):
    options = {"concurrency": 2, "memory_limit": 2**20}
    actual = logprobs(folder, load_format="runai_streamer", model_loader_extra_config=options)
    assert torch.equal(actual, expected)
    assert not {"RUNAI_STREAMER_CONCURRENCY", "RUNAI_STREAMER_MEMORY_LIMIT"} & os.environ.keys()


def test_the_streamer_reads_shards(folder, expected):
    tensors = weights(folder)
    files = [f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    where = {name: files[i % 2] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert torch.equal(logprobs(folder, load_format="runai_streamer"), expected)


def test_what_the_streamer_cannot_do_is_said(folder):
    def refused(message, **options):
        with pytest.raises(ModulmError, match=message):
            logprobs(folder, load_format="runai_streamer", model_loader_extra_config=options)

    refused(r"distributed", distributed=True)
    refused(r"concurrency", concurrency=0)
    refused(r"model_loader_extra_config: unknown option threads", threads=2)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    refused(r"model\.safetensors: .*the file is truncated")
    file.unlink()
    refused(r"no \*\.safetensors files")


@pytest.mark.parametrize(
    ("format_", "module", "message"),
    [
        ("tensorizer", "tensorizer", r"pip install 'modulm-loader-tensorizer\[library\]'"),
        ("runai_streamer", "runai_model_streamer", r"'modulm-loader-runai-streamer\[library\]'"),
    ],
)
def test_a_library_that_is_not_installed_is_named(folder, monkeypatch, format_, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModulmError, match=message):
        logprobs(folder, load_format=format_)


# A file for each rank

SHARDED = {
    "dense": ("LlamaForCausalLM", {}),
    "tied heads and biases": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "fused on disk": ("Phi3ForCausalLM", {}),
    "experts": ("MixtralForCausalLM", {}),
    "stored transposed": ("GPT2LMHeadModel", {}),
    "latent attention": ("DeepseekV2ForCausalLM", {}),
}


@pytest.mark.parametrize("what", SHARDED)
def test_a_file_for_each_rank_gives_the_same_numbers(tmp_path, what):
    architecture, settings = SHARDED[what]
    plain = make_tiny(tmp_path / "plain", architecture, num_hidden_layers=2, **settings)
    out = sharded(plain, tmp_path / "out", "--max-file-size", "65536")
    files = sorted(file.name for file in out.glob("*.safetensors"))
    assert files[:2] == [f"model-rank-0-part-{part}.safetensors" for part in (0, 1)]
    assert (out / "tokenizer_config.json").exists()
    assert torch.equal(logprobs(out), logprobs(plain))  # by itself


def test_a_quantized_checkpoint_stays_as_it_is_stored(tiny, tmp_path):
    from modulm_command_quantize.command import command as quantize

    options = ["--scheme", "w4a16", "--group-size", "32", "--no-perplexity"]
    coded = tmp_path / "coded"
    CliRunner().invoke(quantize, [str(tiny), str(coded), *options], catch_exceptions=False)
    out = sharded(coded, tmp_path / "out")
    actual = logprobs(out, load_format="sharded_state")
    assert torch.equal(actual, logprobs(coded))
    with_int8 = {"load_format": "sharded_state", "quantization": "int8", "kernels": None}
    plain = sharded(tiny, tmp_path / "plain")
    wanted = logprobs(tiny, quantization="int8", kernels=None)
    assert torch.equal(logprobs(plain, **with_int8), wanted)


def test_names_of_a_ranks_files(tiny, tmp_path):
    pattern = "rank-{rank}-of-{ranks}-{part}.safetensors"
    out = sharded(tiny, tmp_path / "out", "--file-pattern", pattern)
    assert [file.name for file in out.glob("*.safetensors")] == ["rank-0-of-1-0.safetensors"]
    options = {"pattern": pattern}
    actual = logprobs(out, load_format="sharded_state", model_loader_extra_config=options)
    assert torch.equal(actual, logprobs(tiny))
    with pytest.raises(ModulmError, match=r"parts 0 to the last of model-rank-0-part"):
        logprobs(out, load_format="sharded_state")
    with pytest.raises(ConfigError, match="a name with {rank} and {part}"):
        logprobs(out, load_format="sharded_state", model_loader_extra_config={"pattern": "x"})
    with pytest.raises(ConfigError, match="a name with {rank} and {part}"):
        sharded(tiny, tmp_path / "more", "--file-pattern", "../{rank}-{part}.safetensors")
    with pytest.raises(ConfigError, match="not empty"):
        sharded(tiny, out)


def test_a_part_that_is_missing_is_named(tiny, tmp_path):
    out = sharded(tiny, tmp_path / "out", "--max-file-size", "20000")
    (out / "model-rank-0-part-1.safetensors").unlink()
    with pytest.raises(ModulmError, match=r"found: model-rank-0-part-0\.safetensors, model"):
        logprobs(out)


# bitsandbytes


def test_the_loader_that_means_a_method(folder):
    flags = {"quantization": "bitsandbytes", "kernels": None}
    wanted = logprobs(folder, **flags)
    assert torch.equal(logprobs(folder, load_format="bitsandbytes", **flags), wanted)

    def resolved(**more):
        config = EngineConfig.from_keywords(
            model=str(folder), load_format="bitsandbytes", device="cpu", **more
        )
        return resolve_checkpoint(config, manager.current()).resolved.config.model.quantization

    assert resolved() == "bitsandbytes"
    assert resolved(quantization="int8") == "int8"
