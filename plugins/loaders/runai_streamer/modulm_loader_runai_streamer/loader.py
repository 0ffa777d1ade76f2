"""Safetensors through NVIDIA Run:ai's model streamer, which reads ahead with several threads.

Used with `--load-format runai_streamer`, with vLLM's keys in `--model-loader-extra-config`. The
library takes its settings from environment variables, which are set only while it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from attrs import field, frozen, validators

from modulm.config.environ import variables_for_library
from modulm.errors import CheckpointError
from modulm.plugins.index import to_install
from modulm.plugins.options import structure
from modulm_tensor_files import SafetensorsFolder

__all__ = ["RunaiStreamerConfig", "RunaiStreamerLoader"]


@frozen
class RunaiStreamerConfig:
    """Settings of the streamer.

    `concurrency`: reading threads. `memory_limit`: bytes of their buffers, -1 for the size of the
    files. `distributed`: several ranks share the reading; not supported yet.
    """

    concurrency: int | None = field(default=None, validator=validators.optional(validators.ge(1)))
    memory_limit: int | None = field(default=None, validator=validators.optional(validators.ge(-1)))
    distributed: bool = False

    def __attrs_post_init__(self) -> None:
        if self.distributed:
            raise ValueError("distributed: not supported yet; each rank reads its own files")

    @property
    def variables(self) -> Mapping[str, str]:
        """Return the environment variables of the library."""
        settings = {
            "RUNAI_STREAMER_CONCURRENCY": self.concurrency,
            "RUNAI_STREAMER_MEMORY_LIMIT": self.memory_limit,
        }
        return {name: str(value) for name, value in settings.items() if value is not None}


class RunaiStreamerLoader(SafetensorsFolder):
    """Reads the folders of the safetensors loader; selected only by name."""

    name = "runai_streamer"
    api = 1
    Config = RunaiStreamerConfig

    def __init__(self, path: Path, options: Mapping[str, object] | None = None) -> None:
        super().__init__(path)
        self.config = structure(options or {}, RunaiStreamerConfig, "model_loader_extra_config")

    @classmethod
    def opens(cls, path: Path) -> str | None:
        return None

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        files = self.by_file()
        try:
            from runai_model_streamer import SafetensorsStreamer
        except ImportError as error:
            raise CheckpointError(
                "--load-format runai_streamer needs the package runai-model-streamer"
                + to_install("modulm-loader-runai-streamer[library]")
            ) from error
        with variables_for_library(self.config.variables), SafetensorsStreamer() as streamer:
            try:
                streamer.stream_files([str(self.path / file) for file in files])
                yield from streamer.get_tensors()
            except Exception as error:
                raise CheckpointError(f"{self.path}: streaming failed: {error}") from error
