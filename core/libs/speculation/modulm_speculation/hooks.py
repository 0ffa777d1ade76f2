"""Hooks that create the drafter of `--speculative-config`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError, PluginError
from modulm.plugins import hookimpl, manager
from modulm_speculation.flags import SpeculationConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.drafter import Drafter
    from modulm.contracts.platform import Platform
    from modulm.loading import Loaded
    from modulm.parallel import Mesh

__all__ = ["modulm_config_final", "modulm_drafter", "requested_method"]

log = logging.getLogger("modulm.engine")

#: Keys of vLLM that need not be set.
_NO_EFFECT = {"disable_padded_drafter_batch": "each row has as many drafts as it needs"}
#: Methods for which `model` names a class instead of a speculator.
_CUSTOM = ("custom", "custom_class")


def requested_method(flags: SpeculationConfig) -> tuple[str, dict[str, Any]] | None:
    """Return the drafter that flags name and its options, or None."""
    short = {
        "method": flags.spec_method,
        "model": flags.spec_model,
        "num_speculative_tokens": flags.spec_tokens,
    }
    table = dict(flags.speculative_config)
    for key, value in short.items():
        if value is not None and table.setdefault(key, value) != value:
            raise ConfigError("speculative_config", f"{key}: {table[key]!r} or {value!r}?")
    if not table:
        return None
    for key in [key for key in table if key in _NO_EFFECT]:
        log.info("--speculative-config.%s has no effect: %s", key, _NO_EFFECT[key])
        del table[key]
    method = table.pop("method", "draft_model" if "model" in table else None)
    if not isinstance(method, str):
        raise ConfigError("speculative_config", "method: must be the name of a drafter")
    return method, table


def _registered(table: dict[str, Any]) -> str:
    """Register the class that `model` names and return its name.

    The form is "package.module:Class", or with a dot instead of the colon.
    """
    path = table.pop("model", None)
    if not isinstance(path, str) or "." not in path.replace(":", "."):
        message = "model: the path of a speculator's class is required, package.module:Class"
        raise ConfigError("speculative_config", message)
    if ":" not in path:
        path = ":".join(path.rsplit(".", 1))
    manager.current().register("speculators", path, path)
    return path


def _make_driver(config: EngineConfig) -> tuple[Any, Any, bool] | None:
    """Return (driver, its options, whether draft lengths adapt), or None."""
    requested = requested_method(config.group(SpeculationConfig))
    if requested is None:
        return None
    method, table = requested
    adaptive = table.pop("adaptive", True)
    if not isinstance(adaptive, bool):
        raise ConfigError("speculative_config", "adaptive: must be true or false")
    plugins = manager.current()
    if method in _CUSTOM:
        method = _registered(table)
    try:
        return (
            plugins.load("speculators", method),
            plugins.options("speculators", method, table),
            adaptive,
        )
    except PluginError as error:
        raise ConfigError("speculative_config", f"method: {error}") from error
    except ConfigError as error:
        raise ConfigError("speculative_config", f"{error.field}: {error.message}") from error


def _automatic(
    config: EngineConfig, loaded: Loaded, platform: Platform, mesh: Mesh
) -> tuple[Any, Any, bool] | None:
    """Return what `_make_driver` does, as chosen by `--speculative auto` or its default."""
    from modulm.loading import open_checkpoint
    from modulm_speculation.automatic import choose_speculator, off_by_default, varying_results

    plugins, size = manager.current(), loaded.weight_bytes * mesh.tensor.size
    if "generate" not in loaded.tasks:
        return None
    if config.group(SpeculationConfig).speculative is None:
        if off_by_default(config, platform, size) is not None:
            return None
        if (reason := varying_results(loaded)) is not None:
            log.info("speculative decoding: none (the default on %s: %s)", platform.name, reason)
            return None
    recurrent = any(group.backend is None for group in loaded.groups)
    decision, table = choose_speculator(
        config,
        open_checkpoint(config, plugins),
        type(loaded.model),
        plugins,
        platform=platform,
        weight_bytes=size,
        recurrent=recurrent,
    )
    name = decision.winner
    log.info("speculative decoding: %s (%s)", name or "none", decision.reason)
    if name is None:
        return None
    driver = plugins.load("speculators", name)
    return driver, plugins.options("speculators", name, table), True


@hookimpl
def modulm_config_final(config: EngineConfig) -> None:
    """Validate the speculator's options before a model is loaded."""
    _make_driver(config)


@hookimpl
def modulm_drafter(
    config: EngineConfig, loaded: Loaded, platform: Platform, mesh: Mesh
) -> Drafter | None:
    """Create the speculator of `--speculative-config`."""
    made = _make_driver(config)
    if made is None and config.group(SpeculationConfig).speculative != "off":
        made = _automatic(config, loaded, platform, mesh)
    if made is None:
        return None
    from modulm_speculation.adaptive import Adaptive
    from modulm_speculation.speculator import Speculator
    from modulm_speculation.step.shared import SharedDrafter
    from modulm_speculation.target import Target

    driver, options, adaptive = made
    if issubclass(driver, Speculator):
        speculator = driver.open(options, Target(config, loaded, platform, mesh))
    else:
        speculator = driver(options)
    needs = speculator.needs
    if mesh.tensor.size > 1 and (speculator.caches or needs.hidden or needs.layers):
        speculator = SharedDrafter(speculator, mesh.tensor, platform.device)
    return Adaptive(speculator) if adaptive else speculator
