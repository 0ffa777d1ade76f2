"""Load GGUF files: a single file, a split model, or a folder with one model.

The configuration, tokenizer and chat template come from the file's metadata; the type of each layer
is passed to the quantization method.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch

from modulm.contracts.loader import StoredTensor, TokenizerFiles, WeightLoader
from modulm.errors import CheckpointError
from modulm_quant_gguf.architectures import ARCHITECTURES, entries
from modulm_quant_gguf.configuration import configuration
from modulm_quant_gguf.container import MAGIC, Model, open_model
from modulm_quant_gguf.entries import STORED, Entry
from modulm_quant_gguf.keys import Keys
from modulm_quant_gguf.vocabulary import tokenizer_files

__all__ = ["GGUFLoader"]

_SUFFIX = ".gguf"
#: Prefixes and suffixes of files that are not models: image encoders and importance matrices.
_NO_MODEL = ("mmproj", "imatrix")
_LATER = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_PIECE = re.compile(r"-\d{5}-of-(\d{5})$")
#: Quantization types at the end of file names: Q4_K_M, IQ2_XXS, BF16, MXFP4_MOE, TQ1_0, and
#: Unsloth's (UD-).
_ENDING = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|BF16|F16|F32|MXFP4|NVFP4)\w*)$", re.I)
#: Sampling settings after `general.sampling.` -> our names.
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_ENDS = ("eos", "eot", "eom")


class GGUFLoader(WeightLoader):
    """Loads GGUF files."""

    name = "gguf"
    api = 1

    def __init__(self, path: Path, options: Mapping[str, object] | None = None) -> None:
        super().__init__(path, options)
        if options:
            raise CheckpointError(f"the gguf loader takes no options, got {sorted(options)}")

    @classmethod
    def opens(cls, path: Path) -> str | None:
        if path.is_file():
            with path.open("rb") as opened:
                begins = opened.read(len(MAGIC)) == MAGIC
            return "a GGUF file" if begins or path.suffix == _SUFFIX else None
        if not path.is_dir() or any(path.glob("*.safetensors*")):
            return None
        return "found a GGUF file" if _models(path) else None

    @classmethod
    def choose_files(cls, part: str, names: Sequence[str]) -> Sequence[str] | None:
        models = [name for name in names if name.endswith(_SUFFIX) and _is_model(name)]
        if not models:
            return None
        matches = [name for name in models if _is_of_type(name, part)]
        if len(matches) != 1:
            of_type = "several files have this type" if matches else "no file has this type"
            listed = ", ".join(sorted(matches or {_type(name) for name in models}))
            raise CheckpointError(f"{part}: {of_type}; available: {listed}")
        return _pieces(matches[0], names)

    @cached_property
    def model(self) -> Model:
        """The headers of the files, read once."""
        return open_model(self._file())

    @cached_property
    def keys(self) -> Keys:
        """The metadata of the model."""
        return Keys(self.model)

    def _file(self) -> Path:
        if self.path.is_file():
            return self.path
        models = _models(self.path)
        if len(models) != 1:
            names = ", ".join(file.name for file in models) or "none"
            raise CheckpointError(f"{self.path}: must have exactly one GGUF file, found: {names}")
        return models[0]

    @cached_property
    def _entries(self) -> Mapping[str, Entry]:
        layout = ARCHITECTURES.get(self.keys.architecture)
        if layout is None:
            configuration(self.keys)
            raise CheckpointError(
                f"{self.path}: no tensor names for architecture {self.keys.architecture}"
            )
        by_name: dict[str, Entry] = {}
        for entry in entries(self.model, self.keys, layout):
            if entry.name in by_name:
                first, second = (one.infos[0].name for one in (by_name[entry.name], entry))
                raise CheckpointError(f"{self.path}: {first} and {second} are both {entry.name}")
            by_name[entry.name] = entry
        return by_name

    def configuration(self) -> Mapping[str, object]:
        return {**configuration(self.keys), **self.quantization()}

    def quantization(self) -> Mapping[str, object]:
        suffix = f".{STORED}"
        types = {
            name.removesuffix(suffix): entry.kind.name
            for name, entry in self._entries.items()
            if name.endswith(suffix)
        }
        return {"quantization_config": {"quant_method": "gguf", "types": types}}

    def generation_configuration(self) -> Mapping[str, object]:
        metadata = self.model.metadata
        token_ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
        ends = list(dict.fromkeys(token for token in token_ids if type(token) is int))
        table: dict[str, object] = {"eos_token_id": ends} if ends else {}
        for key, name in _SAMPLING.items():
            value = metadata.get(f"general.sampling.{key}")
            if isinstance(value, int | float) and not isinstance(value, bool):
                table[name] = value
        return table

    def tokenizer(self) -> TokenizerFiles | None:
        return tokenizer_files(self.model)

    def index(self) -> Mapping[str, StoredTensor]:
        return {name: _described(name, entry) for name, entry in self._entries.items()}

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, entry in self._entries.items():
            yield name, entry.read(self.model)


def _described(name: str, entry: Entry) -> StoredTensor:
    dtype, file = str(entry.dtype).removeprefix("torch."), entry.infos[0].file.name
    return StoredTensor(name, entry.shape, dtype, file, entry.bytes)


def _models(folder: Path) -> list[Path]:
    """Return the models in a folder, each by its first file."""
    return sorted(file for file in folder.glob(f"*{_SUFFIX}") if _is_model(file.name))


def _is_model(name: str) -> bool:
    """Whether a file is a model, or the first part of one."""
    file = Path(name).name
    return not _LATER.search(file) and not any(word in file for word in _NO_MODEL)


def _stem(name: str) -> str:
    return _PIECE.sub("", Path(name).name.removesuffix(_SUFFIX))


def _type(name: str) -> str:
    """Return the quantization type at the end of a file name, else the whole name."""
    match = _ENDING.search(_stem(name))
    return match[1] if match else Path(name).name


def _is_of_type(name: str, part: str) -> bool:
    """Whether a file's quantization type, or the file itself, has this name."""
    wanted = part.lower()
    return wanted in (Path(name).name.lower(), _type(name).lower(), _stem(name).lower())


def _pieces(first: str, names: Sequence[str]) -> Sequence[str]:
    """Return all files of a split model. Raises CheckpointError if one is missing."""
    match = _PIECE.search(first.removesuffix(_SUFFIX))
    if match is None:
        return [first]
    stem, count = first.removesuffix(_SUFFIX).removesuffix(match[0]), int(match[1])
    files = [f"{stem}-{at:05d}-of-{count:05d}{_SUFFIX}" for at in range(1, count + 1)]
    missing = [name for name in files if name not in names]
    if missing:
        raise CheckpointError(f"{first}: missing {missing[0]}")
    return files
