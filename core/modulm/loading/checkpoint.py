"""Opening a checkpoint: find its folder and read what it says of itself. No weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.contracts.pooling import PoolingRecipe
from modulm.contracts.quantization import CheckpointInfo
from modulm.errors import CheckpointError, PluginNotFound
from modulm.loading.hub import download, is_hub_id

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["Checkpoint", "open_checkpoint", "pooling_recipe"]


@frozen
class Checkpoint:
    """A folder with a model, and its JSON files as read, `--hf-overrides` applied.

    `architecture` is the first name that config.json gives; which driver runs it is decided when
    the model is loaded.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    architecture: str
    info: CheckpointInfo

    @property
    def architectures(self) -> tuple[str, ...]:
        """All names that config.json gives, best first."""
        return tuple(self.config["architectures"])


def open_checkpoint(config: EngineConfig) -> Checkpoint:
    """The checkpoint of `--model`: a folder, a short name of an installed package, or a hub id.

    Downloads what is missing. Raises CheckpointError naming the file and the key.
    """
    from modulm.plugins import manager

    path = _locate(config, manager.current())
    source = path
    if config.model.hf_config_path is not None:
        source = _folder_or_hub(config.model.hf_config_path, config)
    table = {**_read_json(source / "config.json"), **config.model.hf_overrides}
    architectures = table.get("architectures")
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        architectures = []
    if not architectures:
        raise CheckpointError(
            f"{source / 'config.json'}: architectures: a list with the name of the model's class "
            "is needed (--hf-overrides '{\"architectures\": [...]}' adds one)"
        )
    return Checkpoint(
        path=path,
        config=table,
        generation_config=_read_generation(path),
        architecture=architectures[0],
        info=_info(path, table),
    )


def pooling_recipe(
    config: EngineConfig, checkpoint: Checkpoint, plugins: PluginManager
) -> PoolingRecipe:
    """What plugins read of pooling in its files; an empty recipe if nobody finds anything."""
    if config.model.runner == "generate":
        return PoolingRecipe()
    found = plugins.hook.modulm_pooling(checkpoint=checkpoint, config=config)
    return found if isinstance(found, PoolingRecipe) else PoolingRecipe()


def _locate(config: EngineConfig, plugins: PluginManager) -> Path:
    name = config.model.model
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    try:
        named = plugins.load("checkpoints", name)
    except PluginNotFound:
        return _folder_or_hub(name, config, plugins)
    found = named.source()
    return found if isinstance(found, Path) else _folder_or_hub(str(found), config)


def _folder_or_hub(name: str, config: EngineConfig, plugins: PluginManager | None = None) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise CheckpointError(f"{name}: a checkpoint is a folder; single files: not yet")
    if is_hub_id(name):
        return download(name, config)
    known = ", ".join(d.name for d in plugins.names("checkpoints")) if plugins else ""
    raise CheckpointError(
        f"model {name!r} is neither a folder nor a hub id (owner/name)"
        + (f" nor one of the installed models: {known}" if known else "")
    )


def _info(path: Path, config: Mapping[str, Any]) -> CheckpointInfo:
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        raise CheckpointError(f"{path / 'config.json'}: quantization_config: a table is needed")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    return CheckpointInfo(
        config=config,
        quantization=quantization,
        files=tuple(sorted(file.name for file in path.iterdir())),
        dtype=str(stored).removeprefix("torch."),
    )


def _read_generation(path: Path) -> Mapping[str, Any]:
    file = path / "generation_config.json"
    return _read_json(file) if file.exists() else {}


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object from disk. Raises CheckpointError for anything else."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: there is no such file, so this is no checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: a JSON object is needed, not a {type(table).__name__}")
    return table
