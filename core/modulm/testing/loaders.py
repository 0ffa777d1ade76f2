"""The contract kit for weight loaders.

    from modulm.testing.loaders import check_loader

    def test_contract():
        check_loader(MyLoader, sample=write_mine)

`sample(folder, tensors)` writes a checkpoint in the loader's format into an empty folder and
returns what the loader opens: the folder, or a file in it. Without it, and without the static
method `kit_sample` on the class, safetensors are tried.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias

import torch

from modulm.contracts.loader import StoredTensor, TokenizerFiles, WeightLoader
from modulm.errors import CheckpointError
from modulm.testing.kit import KitNotRun

__all__ = ["check_loader"]

#: Writes tensors into a folder, and returns what the loader opens.
Writer: TypeAlias = "Callable[[Path, Mapping[str, torch.Tensor]], Path]"


def check_loader(driver: type[WeightLoader], *, sample: Writer | None = None) -> None:
    """Run the kit. Raises AssertionError with what was expected, KitNotRun without a sample."""
    writer: Writer = sample or getattr(driver, "kit_sample", None) or _write_safetensors
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in _foreign(folder / "foreign"):
            reason = driver.opens(path)
            assert reason is None, f"opens() claims {path.name}, which is not in its format"
        tensors = _tensors()
        (folder / "sample").mkdir()
        path = writer(folder / "sample", tensors)
        reason = driver.opens(path)
        if reason is None and writer is _write_safetensors:
            raise KitNotRun("it does not open safetensors: pass sample=, a function that writes its"
                            " format")  # fmt: skip
        assert reason, f"opens() gave {reason!r} for a checkpoint in its format"
        _check_downloads(driver, path)
        assert isinstance(reason, str), f"opens() gave {reason!r}, not a reason"
        if driver(path).expect(_described(tensors)):
            raise KitNotRun("it generates weights instead of reading them")
        _check_tensors(driver, path, tensors)
        _check_texts(driver(path))
        _check_torn(driver, path)


def _check_downloads(driver: type[WeightLoader], path: Path) -> None:
    """Compare the patterns of files to download with what the sample consists of."""
    names = [path.name] if path.is_file() else [file.name for file in path.iterdir()]
    patterns = driver.downloads
    assert patterns is None or isinstance(patterns, tuple), f"downloads is {patterns!r}, no tuple"
    found = any(fnmatch(name, pattern) for name in names for pattern in patterns or ())
    assert not patterns or found, f"none of {', '.join(names)} is among downloads: {patterns}"


def _tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(16, 8, generator=draw),
        "model.norm.weight": torch.randn(8, generator=draw).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(12, 8, generator=draw).half(),
        "lm_head.weight": torch.randn(16, 8, generator=draw),
    }


def _described(tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(name, tuple(t.shape), str(t.dtype).partition(".")[2], "", t.nbytes)
        for name, t in tensors.items()
    }


def _write_safetensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    from safetensors.torch import save_file

    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return folder


def _foreign(folder: Path) -> tuple[Path, ...]:
    """Return a folder and files of no format."""
    folder.mkdir()
    empty, text = folder / "empty", folder / "notes.txt"
    empty.mkdir()
    text.write_text("nothing to load")
    return empty, text, folder / "missing"


def _check_tensors(
    driver: type[WeightLoader], path: Path, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Compare index and tensors with what was written."""
    loader = driver(path)
    index = dict(loader.index())
    assert set(index) == set(tensors), f"index() lists {sorted(index)}, not {sorted(tensors)}"
    for _ in range(2):
        seen: dict[str, Any] = {}
        for name, tensor in loader.read():
            assert name not in seen, f"read() yields {name} twice"
            assert name in index, f"read() yields {name}, which index() does not list"
            seen[name] = tensor
            _check_tensor(name, tensor, index[name], tensors[name])
        missing = sorted(set(index) - set(seen))
        assert not missing, f"read() does not yield {', '.join(missing)}"


def _check_tensor(
    name: str, tensor: torch.Tensor, stored: StoredTensor, written: torch.Tensor
) -> None:
    assert isinstance(stored, StoredTensor), f"index() has {stored!r} for {name}"
    assert stored.name == name, f"index() calls {name} {stored.name!r}"
    assert stored.shape == tuple(written.shape), f"index() gives shape {stored.shape} for {name}"
    assert tuple(tensor.shape) == stored.shape, f"read() gives shape {tuple(tensor.shape)}: {name}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    assert dtype == stored.dtype, f"read() gives {dtype} for {name}, index() {stored.dtype}"
    assert stored.bytes > 0, f"index() gives {stored.bytes} bytes for {name}"
    same = torch.equal(tensor.cpu().float(), written.float())
    assert same, f"read() gives other numbers for {name} than were written"


def _check_texts(loader: WeightLoader) -> None:
    for method in ("configuration", "generation_configuration", "quantization"):
        answer = getattr(loader, method)()
        assert answer is None or isinstance(answer, Mapping), f"{method}() gave {answer!r}"
    files = loader.tokenizer()
    assert files is None or isinstance(files, TokenizerFiles), f"tokenizer() gave {files!r}"


def _check_torn(driver: type[WeightLoader], path: Path) -> None:
    """Check that a file which ends early is an error, and not tensors of whatever is there."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[: len(content) * 2 // 3])
    try:
        loader = driver(path)
        loader.index()
        list(loader.read())
    except CheckpointError:
        return
    except Exception as error:
        raise AssertionError(
            f"a truncated file raises {type(error).__name__}, not CheckpointError: {error}"
        ) from error
    finally:
        largest.write_bytes(content)
    raise AssertionError("a truncated file is read as if it were whole")
