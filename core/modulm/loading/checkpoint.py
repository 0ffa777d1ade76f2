"""Open a checkpoint: find its folder and read its configuration. No weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.contracts.checkpoint import Checkpoint
from modulm.contracts.pooling import PoolingRecipe
from modulm.contracts.quantization import CheckpointInfo
from modulm.errors import CheckpointError, PluginNotFound
from modulm.loading.sources import fetch
from modulm.loading.unsupported import folder_kind, weights_hint
from modulm.plugins import defaults

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.loader import TokenizerFiles, WeightLoader
    from modulm.plugins.manager import PluginManager

__all__ = ["Checkpoint", "open_checkpoint", "open_loader", "pooling_recipe", "stored_tokenizer"]

#: Most names of installed models in an error.
_SHOWN = 8


def open_checkpoint(config: EngineConfig, plugins: PluginManager) -> Checkpoint:
    """Open the checkpoint of `--model`: a folder or file, a name from an installed package, or a
    hub id.

    Downloads missing files. Raises CheckpointError naming the file and the key.
    """
    path = _locate(config, plugins)
    file, stored, generation = path / "config.json", None, None
    quantization: Mapping[str, object] = {}
    if config.model.hf_config_path is not None:
        file = _find_or_fetch(config.model.hf_config_path, config, plugins) / "config.json"
        quantization = (
            open_loader(config, path, plugins).driver.quantization() if path.is_file() else {}
        )
    elif (loader := _describing(config, path, plugins)) is not None:
        stored, generation = loader.configuration(), loader.generation_configuration()
        file = file if stored is None else path
    stored = {**quantization, **_read_json(file)} if stored is None else stored
    table = {**stored, **config.model.hf_overrides}
    listed = table.get("architectures")
    if not listed or not isinstance(listed, list) or not all(isinstance(a, str) for a in listed):
        raise CheckpointError(
            f"{file}: architectures: must be a list with the name of the model's class "
            "(--hf-overrides '{\"architectures\": [...]}' adds one)"
        )
    return Checkpoint(
        path=path,
        config=table,
        generation_config=_read_generation(path) if generation is None else generation,
        architecture=listed[0],
        info=_info(path, file, table),
        config_file=file,
    )


def open_loader(
    config: EngineConfig, path: Path, plugins: PluginManager
) -> defaults.Chosen[WeightLoader]:
    """Return the loader of --load-format, or the one that opens `path`.

    Raises CheckpointError if no installed loader opens it.
    """
    load_format = config.load.load_format
    try:
        chosen = defaults.choose_loader(
            plugins, path, None if load_format == "auto" else load_format
        )
    except CheckpointError as error:
        raise CheckpointError(f"{error}{weights_hint(path)}") from error
    plugin_options = config.device.options("loaders", str(chosen.decision.winner))
    loader = chosen.driver(path, {**config.load.model_loader_extra_config, **plugin_options})
    return defaults.Chosen(loader, chosen.decision)


def stored_tokenizer(config: EngineConfig, path: Path) -> TokenizerFiles | None:
    """Return the tokenizer that a loader finds in the weights; None if the checkpoint has tokenizer
    files.
    """
    from modulm.plugins import manager

    loader = _describing(config, path, manager.current())
    return None if loader is None else loader.tokenizer()


def _describing(config: EngineConfig, path: Path, plugins: PluginManager) -> WeightLoader | None:
    """Return the loader of self-describing weights, which have no config.json beside them."""
    if (path / "config.json").exists() or not path.exists():
        return None
    try:
        return open_loader(config, path, plugins).driver
    except CheckpointError:
        if path.is_file():
            raise
        return None


def pooling_recipe(
    config: EngineConfig, checkpoint: Checkpoint, plugins: PluginManager
) -> PoolingRecipe:
    """Return the pooling settings that plugins read in the checkpoint's files; may be empty."""
    if config.model.runner == "generate":
        return PoolingRecipe()
    recipe = plugins.hook.modulm_pooling(checkpoint=checkpoint, config=config)
    return recipe if isinstance(recipe, PoolingRecipe) else PoolingRecipe()


def _locate(config: EngineConfig, plugins: PluginManager) -> Path:
    name = config.model.model
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    try:
        model = plugins.load("checkpoints", name)
    except PluginNotFound:
        return _find_or_fetch(name, config, plugins)
    source = model.source()
    return source if isinstance(source, Path) else _find_or_fetch(str(source), config, plugins)


def _find_or_fetch(name: str, config: EngineConfig, plugins: PluginManager) -> Path:
    path = Path(name).expanduser()
    found = path if path.exists() else fetch(name, config, plugins)
    if found is not None:
        return found
    known = [d.name for d in plugins.names("checkpoints") if ":" not in d.name]
    rest = " and others (modulm plugins list checkpoints)" if len(known) > _SHOWN else ""
    raise CheckpointError(
        f"model {name!r} is neither a folder nor a hub id (owner/name, or owner/name:PART)"
        + (f" nor one of the installed models: {', '.join(known[:_SHOWN])}{rest}" if known else "")
    )


def _info(path: Path, file: Path, config: Mapping[str, Any]) -> CheckpointInfo:
    inner = config.get("text_config")
    table = config if "quantization_config" in config or not isinstance(inner, Mapping) else inner
    quantization = table.get("quantization_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        raise CheckpointError(f"{file}: quantization_config: must be a table")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    return CheckpointInfo(
        config=config,
        quantization=quantization,
        files=tuple(sorted(one.name for one in (path.iterdir() if path.is_dir() else [path]))),
        dtype=str(stored).removeprefix("torch."),
        folder=path if path.is_dir() else None,
    )


def _read_generation(path: Path) -> Mapping[str, Any]:
    file = path / "generation_config.json"
    return _read_json(file) if file.exists() else {}


def _read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from disk. Raises CheckpointError for anything else."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: {folder_kind(file.parent)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: must be a JSON object, not {type(table).__name__}")
    return table
