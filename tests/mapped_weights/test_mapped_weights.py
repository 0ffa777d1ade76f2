"""Weights mapped from packed files give the outputs of those in memory, and are packed once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.samples import parametrize_sample

import modulm_mapped_weights.filling as filling
from modulm import LLM, SamplingParams
from modulm.errors import ConfigError
from modulm.testing.checkpoints import make_tiny
from modulm_mapped_weights.file import VERSION, FileReader, FileWriter, InvalidFile
from modulm_mapped_weights.folder import CacheFolder
from modulm_weights_shared_memory import SharedWeights

FLAGS: dict[str, Any] = {
    "dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 16,
    "cpu_threads": 1, "skip_tokenizer_init": True,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
PROMPT = {"prompt_token_ids": list(range(5, 40))}
Answer = tuple[list[int], list[dict[int, float]]]


def answer(llm: LLM) -> Answer:
    (output,) = llm.generate([PROMPT], PARAMS, use_tqdm=False)
    first = output.outputs[0]
    logprobs = [{token: entry.logprob for token, entry in step.items()} for step in first.logprobs]
    return list(first.token_ids), logprobs


def run(model: Path, **flags: Any) -> Answer:
    with LLM(str(model), **FLAGS, **flags) as llm:
        return answer(llm)


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that are read from checkpoints instead of mapped."""
    seen: list[str] = []
    original = filling.fill

    def fill(plan: Any, loader: Any, **more: Any) -> None:
        seen.append(loader.path.name)
        original(plan, loader, **more)

    monkeypatch.setattr(filling, "fill", fill)
    return seen


def mapped(folder: Path) -> dict[str, Any]:
    return {"weights_memory": "mmap", "weights_cache_dir": str(folder)}


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.weights"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("mapped") / "model", "Qwen3ForCausalLM", seed=1)


@pytest.fixture(scope="module")
def cache(model: Path) -> Path:
    """A folder with the packed weights of `model`."""
    folder = model.parent / "cache"
    with LLM(str(model), **FLAGS, **mapped(folder)) as llm:
        (model.parent / "expected").write_text(repr(answer(llm)))
    return folder


CASES = [
    ("Qwen3ForCausalLM", "none", {"tie_word_embeddings": True}),
    ("Qwen3ForCausalLM", "int4", {}),
    ("Qwen3MoeForCausalLM", "int8", {}),
    ("DeepseekV3ForCausalLM", "fp8_per_block", {}),
    ("MixtralForCausalLM", "none", {}),
    ("GptOssForCausalLM", "int4", {}),
    ("MambaForCausalLM", "none", {}),
]


@parametrize_sample(("architecture", "quantization", "config"), CASES, 3)
def test_the_second_start_maps(
    architecture: str, quantization: str, config: dict[str, Any], tmp_path: Path, packs: list[str]
) -> None:
    model, cache = make_tiny(tmp_path / "model", architecture, **config), tmp_path / "cache"
    flags = {} if quantization == "none" else {"quantization": quantization}
    expected = run(model, **flags)
    assert packs == []
    assert run(model, **flags, **mapped(cache)) == expected
    assert packs == ["model"]
    assert run(model, **flags, **mapped(cache)) == expected
    assert packs == ["model"]
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".weights"]


def test_an_update_leaves_the_file_as_it_was(model: Path, cache: Path, packs: list[str]) -> None:
    other = make_tiny(model.parent / "other", "Qwen3ForCausalLM", seed=2)
    (file,), expected = files(cache), run(other)
    content = file.read_bytes()
    transfer = {"weight_transfer_config": {"backend": "shared_memory"}}
    with LLM(str(model), **FLAGS, **mapped(cache), **transfer) as llm:
        assert repr(answer(llm)) == (model.parent / "expected").read_text()
        llm.init_weight_transfer_engine()
        with SharedWeights(load_file(other / "model.safetensors")) as shared:
            llm.start_weight_update()
            llm.update_weights(shared.info)
            llm.finish_weight_update()
        assert answer(llm) == expected
    assert packs == []
    assert file.read_bytes() == content


def test_folders_and_weights_that_cannot_be_used(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="weights_cache_dir.*file/below cannot be written"):
        run(model, **mapped(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="weights_cache_size.*less than the packed weights"):
        run(model, **mapped(tmp_path / "small"), weights_cache_size=1e-4)
    assert [path.suffix for path in (tmp_path / "small").iterdir()] == [".lock"]
    with pytest.raises(ConfigError, match="made up"):
        run(model, **mapped(tmp_path), load_format="dummy")


def test_a_changed_checkpoint_is_packed_again(tmp_path: Path, packs: list[str]) -> None:
    model, cache = make_tiny(tmp_path / "model", seed=3), tmp_path / "cache"
    run(model, **mapped(cache))
    make_tiny(model, seed=4)
    assert run(model, **mapped(cache)) == run(model)
    assert packs == ["model", "model"]
    assert len(files(cache)) == 2


@pytest.mark.exhaustive
def test_ranks_have_files_of_their_own(model: Path, tmp_path: Path, packs: list[str]) -> None:
    flags = {"tensor_parallel_size": 2}
    expected = run(model, **flags)
    assert run(model, **flags, **mapped(tmp_path)) == expected
    assert len(files(tmp_path)) == 2
    assert run(model, **flags, **mapped(tmp_path)) == expected


def written(path: Path, key: str = "a") -> Path:
    writer = FileWriter(path, 1 << 20)
    writer.add(torch.arange(12.0).view(3, 4).T)
    writer.mapped()
    writer.finish({"key": key})
    writer.close()
    return path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def other_version(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:24] + bytes([VERSION + 1]) + content[25:])


def no_head(path: Path) -> None:
    path.write_bytes(bytes(4096) + path.read_bytes()[4096:])


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3] + b"x" * 3)


def shared(path: Path) -> None:
    path.chmod(0o666)


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


REASONS: dict[str, Callable[[Path], None]] = {
    "is damaged": damaged, "has version 2, not 1": other_version, "is not complete": no_head,
    "can be written by other users": shared, "cannot be read: Too many levels": linked,
}  # fmt: skip


def test_files_that_are_torn_or_foreign(tmp_path: Path) -> None:
    for reason, change in REASONS.items():
        path = written(tmp_path / "a")
        FileReader(path)
        change(path)
        with pytest.raises(InvalidFile, match=reason):
            FileReader(path)
        path.unlink()
    cut(path := written(tmp_path / "a"))
    with pytest.raises(InvalidFile, match="is damaged"):
        FileReader(path)


def test_a_torn_file_is_written_again(model: Path, cache: Path, packs: list[str]) -> None:
    (file,) = files(cache)
    content = file.read_bytes()
    cut(file)
    assert repr(run(model, **mapped(cache))) == (model.parent / "expected").read_text()
    assert packs == ["model"]
    assert file.read_bytes() == content


def test_the_file_of_another_key_is_ignored(tmp_path: Path) -> None:
    written(tmp_path / "b.weights", key="a")
    assert CacheFolder(tmp_path, 1 << 20).read("b") is None


def test_the_files_used_longest_ago_are_deleted(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 3 * written(tmp_path / "0.weights").stat().st_size)
    for age, name in enumerate("cab"):
        os.utime(written(tmp_path / f"{name}.weights", name), (100 - age, 100 - age))
    (tmp_path / "killed.part").write_bytes(b"1")
    assert folder.read("a") is not None  # now the latest but "0"
    with folder.lock("d"), folder.write("d") as writer:
        writer.finish({"key": "d"})
    assert [path.stem for path in files(tmp_path)] == ["0", "a", "d"]
    assert not list(tmp_path.glob("*.part"))


def test_one_of_two_processes_packs(tmp_path: Path) -> None:
    folder, done = CacheFolder(tmp_path, 1 << 20), tmp_path / "done"

    def child() -> None:
        with folder.lock("a"):
            done.write_text("read" if folder.read("a") else "missing")

    with folder.lock("a"):
        pid = os.fork()
        if pid == 0:
            child()
            os._exit(0)
        with folder.write("a") as writer:
            writer.finish({"key": "a"})
    os.waitpid(pid, 0)
    assert done.read_text() == "read"


def test_a_body_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 1 << 20)
    with pytest.raises(ValueError, match="body"), folder.lock("a"), folder.write("a"):
        raise ValueError("body")
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]
