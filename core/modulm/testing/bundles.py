"""A checkpoint in one file: weights, configuration, tokenizer and chat template.

The file is safetensors, with the contents of the other files in its metadata under their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from modulm.contracts.loader import StoredTensor, TokenizerFiles, WeightLoader
from modulm.errors import CheckpointError

__all__ = ["BundleLoader", "write_bundle"]

_SUFFIX = ".bundle"


class BundleLoader(WeightLoader):
    """Reads files written by `write_bundle`."""

    name = "bundle"
    api = 1

    @classmethod
    def opens(cls, path: Path) -> str | None:
        return "a bundle" if path.is_file() and path.suffix == _SUFFIX else None

    def __init__(self, path: Path, options: Mapping[str, object] | None = None) -> None:
        super().__init__(path, options)
        try:
            with safe_open(path, framework="pt") as opened:
                self._texts: Mapping[str, str] = opened.metadata() or {}
        except Exception as error:
            raise CheckpointError(f"{path}: not a bundle: {error}") from error

    def configuration(self) -> Mapping[str, object] | None:
        return self._table("config.json")

    def generation_configuration(self) -> Mapping[str, object] | None:
        return self._table("generation_config.json")

    def tokenizer(self) -> TokenizerFiles | None:
        settings = dict(self._table("tokenizer_config.json"))
        if "chat_template.jinja" in self._texts:
            settings["chat_template"] = self._texts["chat_template.jinja"]
        return TokenizerFiles(self._texts["tokenizer.json"], settings)

    def _table(self, name: str) -> Mapping[str, object]:
        table: Mapping[str, object] = json.loads(self._texts.get(name, "{}"))
        return table

    def index(self) -> Mapping[str, StoredTensor]:
        tensors: dict[str, StoredTensor] = {}
        with safe_open(self.path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                dtype = str(tensor.dtype).removeprefix("torch.")
                shape, file = tuple(tensor.shape), self.path.name
                tensors[name] = StoredTensor(name, shape, dtype, file, tensor.nbytes)
        return tensors

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        with safe_open(self.path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                yield name, opened.get_tensor(name)


def write_bundle(folder: Path, file: Path) -> Path:
    """Pack a checkpoint's folder, with a single weight file, into one file."""
    texts = {f.name: f.read_text("utf-8") for f in folder.iterdir() if f.suffix != ".safetensors"}
    save_file(load_file(folder / "model.safetensors"), file.with_suffix(_SUFFIX), texts)
    return file.with_suffix(_SUFFIX)
