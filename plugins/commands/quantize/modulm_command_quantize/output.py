"""The output folder: one file per layer, written atomically, so that runs can resume."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen
from safetensors.torch import load_file, save_file
from torch import Tensor

from modulm.errors import ConfigError
from modulm_tensor_files import copy_beside, replace

__all__ = ["Output"]

_STATE = ".quantize"


@frozen
class Output:
    """A folder with one file per step of `total`. An interrupted run can be resumed: each file is
    written atomically, and config.json last.
    """

    folder: Path
    total: int

    @classmethod
    def begin(cls, folder: Path, total: int, settings: Mapping[str, Any]) -> Output:
        """Create the folder, or resume one of an interrupted run with the same settings.

        Raises ConfigError if it contains anything else.
        """
        notes = folder / _STATE / "settings.json"
        if notes.exists():
            if json.loads(notes.read_text()) != json.loads(json.dumps(settings)):
                raise ConfigError(
                    "out", f"{folder} contains an unfinished run with other settings: remove it"
                )
        elif folder.exists() and any(folder.iterdir()):
            raise ConfigError("out", f"{folder} exists and is not empty")
        else:
            notes.parent.mkdir(parents=True, exist_ok=True)
            replace(notes, json.dumps(settings).encode())
        return cls(folder, total)

    def file(self, step: int) -> Path:
        return self.folder / f"model-{step + 1:05d}-of-{self.total:05d}.safetensors"

    def done(self, step: int) -> bool:
        """Whether a step's file exists."""
        return self.file(step).exists()

    def write(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Save all tensors of a step."""
        self._save(self.file(step), tensors)

    def _save(self, file: Path, tensors: Mapping[str, Tensor]) -> None:
        unfinished = self.folder / _STATE / f"{file.name}.part"
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, unfinished, {"format": "pt"})
        with unfinished.open("rb") as opened:
            os.fsync(opened.fileno())
        unfinished.replace(file)

    def keep_hidden(self, step: int, hidden: Tensor) -> None:
        """Store a layer's output for the next step."""
        self._save(self._hidden(step), {"hidden": hidden})

    def drop_hidden(self, step: int) -> None:
        """Delete the stored output once the next step is written."""
        self._hidden(step).unlink(missing_ok=True)

    def hidden(self, step: int) -> Tensor:
        """Load the output that `keep_hidden` stored."""
        return load_file(self._hidden(step))["hidden"]

    def _hidden(self, step: int) -> Path:
        return self.folder / _STATE / f"hidden-{step}.safetensors"

    def finish(
        self, source: Path, config: Mapping[str, Any], names: Sequence[Sequence[str]]
    ) -> None:
        """Write the index, the source's other files, and config.json."""
        weight_map = {
            name: self.file(step).name for step, here in enumerate(names) for name in here
        }
        size = sum(self.file(step).stat().st_size for step in range(self.total))
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        copy_beside(source, self.folder)
        replace(self.folder / "model.safetensors.index.json", json.dumps(index, indent=1).encode())
        replace(self.folder / "config.json", json.dumps(config, indent=2).encode())
        shutil.rmtree(self.folder / _STATE)
