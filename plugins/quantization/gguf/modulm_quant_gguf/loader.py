"""GGUF files: one, one in pieces, or a folder with one.

The file says what it is: configuration, tokenizer and chat template come from its metadata, and the
type of each layer goes to the quantization method in a table of its own.
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
#: Pictures' encoders, and matrices from which types were chosen, lie beside models.
_NO_MODEL = ("mmproj", "imatrix")
_LATER = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_PIECE = re.compile(r"-\d{5}-of-(\d{5})$")
#: Types at the end of names: Q4_K_M, IQ2_XXS, BF16, MXFP4_MOE, TQ1_0, and those of Unsloth (UD-).
_ENDING = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|BF16|F16|F32|MXFP4|NVFP4)\w*)$", re.I)
#: Settings of sampling that files name after `general.sampling.`, and our names.
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_ENDS = ("eos", "eot", "eom")


class GGUFLoader(WeightLoader):
    """Reads what llama.cpp and its kin write."""

    name = "gguf"
    api = 1

    def __init__(self, path: Path, options: Mapping[str, object] | None = None) -> None:
        super().__init__(path, options)
        if options:
            raise CheckpointError(f"the gguf loader has no options, got {sorted(options)}")

    @classmethod
    def opens(cls, path: Path) -> str | None:
        if path.is_file():
            with path.open("rb") as opened:
                begins = opened.read(len(MAGIC)) == MAGIC
            return "it is a GGUF file" if begins or path.suffix == _SUFFIX else None
        if not path.is_dir() or any(path.glob("*.safetensors*")):
            return None
        return "there is a GGUF file" if _models(path) else None

    @classmethod
    def choose_files(cls, part: str, names: Sequence[str]) -> Sequence[str] | None:
        models = [name for name in names if name.endswith(_SUFFIX) and _is_model(name)]
        if not models:
            return None
        found = [name for name in models if _is_of_type(name, part)]
        if len(found) != 1:
            of_type = "several files are of that type" if found else "no file is of that type"
            listed = ", ".join(sorted(found or {_type(name) for name in models}))
            raise CheckpointError(f"{part}: {of_type}; there are: {listed}")
        return _pieces(found[0], names)

    @cached_property
    def model(self) -> Model:
        """The files' headers, read once."""
        return open_model(self._file())

    @cached_property
    def keys(self) -> Keys:
        """The metadata of the model."""
        return Keys(self.model)

    def _file(self) -> Path:
        if self.path.is_file():
            return self.path
        found = _models(self.path)
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise CheckpointError(f"{self.path}: one GGUF file is needed, there are: {names}")
        return found[0]

    @cached_property
    def _entries(self) -> Mapping[str, Entry]:
        layout = ARCHITECTURES.get(self.keys.architecture)
        if layout is None:
            configuration(self.keys)
            raise CheckpointError(f"{self.path}: {self.keys.architecture}: names are not known")
        found: dict[str, Entry] = {}
        for entry in entries(self.model, self.keys, layout):
            if entry.name in found:
                first, second = (one.places[0].name for one in (found[entry.name], entry))
                raise CheckpointError(f"{self.path}: {first} and {second} are both {entry.name}")
            found[entry.name] = entry
        return found

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
        said = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
        ends = list(dict.fromkeys(token for token in said if type(token) is int))
        table: dict[str, object] = {"eos_token_id": ends} if ends else {}
        for key, name in _SAMPLING.items():
            found = metadata.get(f"general.sampling.{key}")
            if isinstance(found, int | float) and not isinstance(found, bool):
                table[name] = found
        return table

    def tokenizer(self) -> TokenizerFiles | None:
        return tokenizer_files(self.model)

    def index(self) -> Mapping[str, StoredTensor]:
        return {name: _described(name, entry) for name, entry in self._entries.items()}

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, entry in self._entries.items():
            yield name, entry.read(self.model)


def _described(name: str, entry: Entry) -> StoredTensor:
    dtype, file = str(entry.dtype).removeprefix("torch."), entry.places[0].file.name
    return StoredTensor(name, entry.shape, dtype, file, entry.bytes)


def _models(folder: Path) -> list[Path]:
    """The models of a folder, each by its first file."""
    return sorted(file for file in folder.glob(f"*{_SUFFIX}") if _is_model(file.name))


def _is_model(name: str) -> bool:
    """Whether a file is a model, or the first piece of one."""
    file = Path(name).name
    return not _LATER.search(file) and not any(word in file for word in _NO_MODEL)


def _stem(name: str) -> str:
    return _PIECE.sub("", Path(name).name.removesuffix(_SUFFIX))


def _type(name: str) -> str:
    """What files end with that are called after their type; else the whole name."""
    found = _ENDING.search(_stem(name))
    return found[1] if found else Path(name).name


def _is_of_type(name: str, part: str) -> bool:
    """Whether a file of a repository is called after a type, or is called so itself."""
    wanted = part.lower()
    return wanted in (Path(name).name.lower(), _type(name).lower(), _stem(name).lower())


def _pieces(first: str, names: Sequence[str]) -> Sequence[str]:
    """All files of a model. Raises CheckpointError for one that is missing."""
    found = _PIECE.search(first.removesuffix(_SUFFIX))
    if found is None:
        return [first]
    stem, count = first.removesuffix(_SUFFIX).removesuffix(found[0]), int(found[1])
    wanted = [f"{stem}-{at:05d}-of-{count:05d}{_SUFFIX}" for at in range(1, count + 1)]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise CheckpointError(f"{first}: {missing[0]} is not beside it")
    return wanted
