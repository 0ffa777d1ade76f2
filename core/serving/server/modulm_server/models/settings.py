"""The settings of each model: from arguments, `--models-config` and `--models-dir`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from attrs import field, frozen

from modulm.config.schema.catalog import catalog
from modulm.errors import ConfigError
from modulm_server.api_keys import read_keys
from modulm_server.flags import ServerConfig
from modulm_server.models.flags import ModelsConfig, parse_duration
from modulm_server.models.library import ModelLibrary

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["ModelSettings", "read_settings"]

#: Settings of a model that are no flags.
_OWN = ("model", "adapter", "aliases", "api_keys", "keep_alive", "pinned", "preload", "sleep")
#: Flags of the whole server, besides those that start with a prefix below.
_SERVER_WIDE = frozenset(
    {
        "host", "port", "uds", "api_key", "api_key_file", "open_paths", "allow_unauthenticated",
        "allowed_hosts", "allowed_origins", "allowed_methods", "allowed_headers",
        "allow_credentials", "root_path", "middleware", "api_server_count", "max_connections",
        "max_request_bytes", "max_inflight_bytes", "request_timeout", "shutdown_timeout",
        "disable_fastapi_docs", "served_model_name", "plugins", "plugins_lock",
        "models_config", "models_dir", "models_dir_writable", "memory_budget", "max_load_queue",
        "load_comment_interval",
        "headless", "nnodes", "node_rank", "disable_frontend_multiprocessing",
        "file_storage_path",
    }
)  # fmt: skip
#: Ends the name under which a model's engine has the weights that its adapter changes.
_BASE = "-without-adapter"
_SERVER_PREFIXES = ("ssl_", "h11_", "uvicorn_", "disable_uvicorn_", "max_stored_")


@frozen(kw_only=True)
class ModelSettings:
    """One model of the server.

    config: of its engine. owners: of the keys that may use it; None: all. keep_alive:
    seconds; None: for ever. pinned: only a request to stop it unloads it. preload: it is loaded
    when the server starts. sleep: level at which it sleeps instead of being stopped when its memory
    or its time is over; 0: it is stopped.
    """

    name: str
    config: EngineConfig
    aliases: tuple[str, ...] = ()
    owners: frozenset[str] | None = None
    keep_alive: float | None = None
    pinned: bool = False
    preload: bool = False
    sleep: int = 0
    adapters: tuple[str, ...] = field(default=(), eq=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, then its aliases."""
        return (self.name, *self.aliases)


def read_settings(config: EngineConfig, models: Iterable[str]) -> tuple[ModelSettings, ...]:
    """The settings of all models. config: the server's, whose engine flags all models share.
    models: those of the command line, which are loaded at start.

    Raises ConfigError naming the model, for wrong settings and for a name that two models have.
    """
    flags = config.group(ModelsConfig)
    tables: dict[str, Mapping[str, Any]] = {model: {"preload": True} for model in models}
    if flags.models_config is not None:
        for name, table in _read_file(flags.models_config).items():
            if name in tables:
                raise _wrong(name, "is both in the file and on the command line")
            tables[name] = table
    if flags.models_dir is not None:
        for name, table in ModelLibrary(Path(flags.models_dir)).models():
            tables.setdefault(name, table)
    settings = tuple(_settings(config, name, table) for name, table in tables.items())
    _check_names(settings)
    return settings


def _read_file(path: str) -> dict[str, Mapping[str, Any]]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("models_config", f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("models_config", f"{path} is not valid YAML: {reason}") from error
    models = content.get("models") if isinstance(content, dict) else None
    if not isinstance(models, dict) or not models:
        raise ConfigError("models_config", f"{path} must have a table `models`: name -> settings")
    if unknown := sorted(map(str, content.keys() - {"models"})):
        raise ConfigError(
            "models_config", f"{path}: {unknown[0]} is unknown: it may have the table `models` only"
        )
    tables: dict[str, Mapping[str, Any]] = {}
    for name, table in models.items():
        if not isinstance(name, str) or not isinstance(table, dict | None):
            raise ConfigError("models_config", f"{path}: models: {name!r} must be a table")
        tables[name] = table or {}
    return tables


def _settings(config: EngineConfig, name: str, table: Mapping[str, Any]) -> ModelSettings:
    try:
        return _read(config, name, table)
    except ConfigError as error:
        raise _wrong(name, f"{error.field}: {error.message}") from error


def _read(config: EngineConfig, name: str, table: Mapping[str, Any]) -> ModelSettings:
    values = {str(key).replace("-", "_"): value for key, value in table.items()}
    own = {key: values.pop(key) for key in _OWN if key in values}
    for key in values:
        flag_name = catalog().canonical(key) or key
        if flag_name in _SERVER_WIDE or flag_name.startswith(_SERVER_PREFIXES):
            raise ConfigError(key, "is a setting of the whole server: set it on the command line")
    aliases = _texts("aliases", own.get("aliases", ()))
    sleep = own.get("sleep", 0)
    if sleep not in (0, 1, 2):
        raise ConfigError("sleep", "must be true, 0, 1 or 2")
    if sleep:
        values["enable_sleep_mode"] = True
    try:
        keep_alive = parse_duration(own.get("keep_alive", config.group(ModelsConfig).keep_alive))
    except ValueError as error:
        raise ConfigError("keep_alive", str(error)) from error
    served: tuple[str, ...] = (name, *aliases)
    if "adapter" in own:
        values |= _adapter_flags(name, own["adapter"], values)
        served = (f"{name}{_BASE}", *aliases)
    model_config = config.with_(
        **values, model=str(own.get("model", name)), served_model_name=served
    )
    return ModelSettings(
        name=name,
        config=model_config,
        aliases=aliases,
        owners=_owners(config, own.get("api_keys")),
        keep_alive=keep_alive,
        pinned=_switch("pinned", own),
        preload=_switch("preload", own),
        sleep=int(sleep),
        adapters=tuple(_adapter_names(model_config)),
    )


def _adapter_flags(name: str, adapter: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with which requests for a model get its adapter."""
    if not isinstance(adapter, str) or not adapter:
        raise ConfigError("adapter", "must be a folder")
    modules = values.get("lora_modules") or ()
    more = [modules] if isinstance(modules, str) else list(modules)
    return {"enable_lora": True, "lora_modules": [f"{name}={adapter}", *more]}


def _adapter_names(config: EngineConfig) -> Iterator[str]:
    """The names of `--lora-modules`, so that requests find the model before it is loaded."""
    for module in config.value("lora_modules") or ():
        if isinstance(module, str) and not module.lstrip().startswith("{"):
            yield module.partition("=")[0]


def _owners(config: EngineConfig, api_keys: Any) -> frozenset[str] | None:
    """The owners of a model's keys. Raises ConfigError for one that the server does not have."""
    if api_keys is None:
        return None
    keys = read_keys(config.group(ServerConfig))
    owners = set()
    for key in _texts("api_keys", api_keys):
        entry = keys.find(key.encode())
        if entry is None:
            raise ConfigError("api_keys", "has a key that is not one of the server's")
        owners.add(entry.owner)
    return frozenset(owners)


def _texts(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(i, str) and i for i in items):
        raise ConfigError(name, "must be a list of texts")
    return tuple(items)


def _switch(name: str, table: Mapping[str, Any]) -> bool:
    value = table.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(name, "must be true or false")
    return value


def _check_names(settings: Iterable[ModelSettings]) -> None:
    owners: dict[str, str] = {}
    for model in settings:
        for name in model.names:
            if name in owners:
                raise _wrong(model.name, f"{name!r} is a name of {owners[name]!r} too")
            owners[name] = model.name


def _wrong(name: str, message: str) -> ConfigError:
    return ConfigError("models_config", f"model {name!r}: {message}")
