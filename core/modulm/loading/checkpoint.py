"""Opening a checkpoint: find its folder and read what it says of itself. No weight is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.contracts.checkpoint import Checkpoint
from modulm.contracts.pooling import PoolingRecipe
from modulm.contracts.quantization import CheckpointInfo
from modulm.errors import CheckpointError, PluginError, PluginNotFound
from modulm.loading.hub import download, download_part, is_hub_id, split_part
from modulm.loading.strangers import folder_kind, weights_hint
from modulm.plugins import defaults

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.loader import TokenizerFiles, WeightLoader
    from modulm.plugins.manager import PluginManager

__all__ = ["Checkpoint", "open_checkpoint", "open_loader", "pooling_recipe", "stored_tokenizer"]


def open_checkpoint(config: EngineConfig, plugins: PluginManager) -> Checkpoint:
    """The checkpoint of `--model`: a folder or file, a short name of an installed package, or a
    hub id.

    Downloads what is missing. Raises CheckpointError naming the file and the key.
    """
    path = _locate(config, plugins)
    file, stored, generation = path / "config.json", None, None
    held: Mapping[str, object] = {}
    if config.model.hf_config_path is not None:
        file = _folder_or_hub(config.model.hf_config_path, config) / "config.json"
        held = open_loader(config, path, plugins).driver.quantization() if path.is_file() else {}
    elif (loader := _describing(config, path, plugins)) is not None:
        stored, generation = loader.configuration(), loader.generation_configuration()
        file = file if stored is None else path
    stored = {**held, **_read_json(file)} if stored is None else stored
    table = {**stored, **config.model.hf_overrides}
    architectures = table.get("architectures")
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        architectures = []
    if not architectures:
        raise CheckpointError(
            f"{file}: architectures: a list with the name of the model's class "
            "is needed (--hf-overrides '{\"architectures\": [...]}' adds one)"
        )
    return Checkpoint(
        path=path,
        config=table,
        generation_config=_read_generation(path) if generation is None else generation,
        architecture=architectures[0],
        info=_info(path, file, table),
        config_file=file,
    )


def open_loader(
    config: EngineConfig, path: Path, plugins: PluginManager
) -> defaults.Chosen[WeightLoader]:
    """The loader of --load-format, or the one that opens `path`.

    Raises CheckpointError if no installed loader does.
    """
    wanted = config.load.load_format
    try:
        chosen = defaults.choose_loader(plugins, path, None if wanted == "auto" else wanted)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{weights_hint(path)}") from error
    given = config.device.options("loaders", str(chosen.decision.winner))
    made = chosen.driver(path, {**config.load.model_loader_extra_config, **given})
    return defaults.Chosen(made, chosen.decision)


def stored_tokenizer(config: EngineConfig, path: Path) -> TokenizerFiles | None:
    """The tokenizer that a loader finds in the weights; None where there are files of it."""
    from modulm.plugins import manager

    loader = _describing(config, path, manager.current())
    return None if loader is None else loader.tokenizer()


def _describing(config: EngineConfig, path: Path, plugins: PluginManager) -> WeightLoader | None:
    """The loader of weights that describe themselves: no config.json is beside them."""
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


def _tokenizer_files(plugins: PluginManager) -> tuple[str, ...]:
    """What installed loaders of tokenizers read; one that is broken says so when it is needed."""
    wanted: dict[str, None] = {}
    for declared in plugins.names("tokenizers"):
        with suppress(PluginError):
            wanted |= dict.fromkeys(plugins.load("tokenizers", declared.name).files)
    return tuple(wanted)


def _folder_or_hub(name: str, config: EngineConfig, plugins: PluginManager | None = None) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path
    if is_hub_id(name):
        return download(name, config, _tokenizer_files(plugins) if plugins else ())
    if plugins is not None and (parted := split_part(name)) is not None:
        choose = partial(defaults.choose_files, plugins, *parted)
        return download_part(parted[0], config, choose)
    known = ", ".join(d.name for d in plugins.names("checkpoints")) if plugins else ""
    raise CheckpointError(
        f"model {name!r} is neither a folder nor a hub id (owner/name, or owner/name:PART)"
        + (f" nor one of the installed models: {known}" if known else "")
    )


def _info(path: Path, file: Path, config: Mapping[str, Any]) -> CheckpointInfo:
    inner = config.get("text_config")
    given = config if "quantization_config" in config or not isinstance(inner, Mapping) else inner
    quantization = given.get("quantization_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        raise CheckpointError(f"{file}: quantization_config: a table is needed")
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
    """A JSON object from disk. Raises CheckpointError for anything else."""
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file}: {folder_kind(file.parent)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: a JSON object is needed, not a {type(table).__name__}")
    return table
