"""Hooks that create the adapter bank of the flags."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from modulm.errors import ConfigError
from modulm.plugins import hookimpl, manager
from modulm_adapters.flags import LoRAConfig

if TYPE_CHECKING:
    from pathlib import Path

    from modulm.contracts.adapter import AdapterBank
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.kernels import Ops
    from modulm.contracts.platform import Platform

__all__ = ["modulm_adapter_bank", "modulm_config_final", "modulm_explain_folder"]

_BANK = "lora"
#: Default number of adapters in host memory.
_HELD = 32


@hookimpl
def modulm_config_final(config: EngineConfig) -> None:
    """Check for contradicting flags and a missing bank before a model is loaded."""
    if not config.group(LoRAConfig).enable_lora:
        return
    if config.device.plugin_config.get("adapters"):
        raise ConfigError(
            "enable_lora", "--plugin-config sets adapters as well: use only one of them"
        )
    manager.current().find("adapters", _BANK)


@hookimpl
def modulm_explain_folder(folder: Path) -> str | None:
    """Name the model of an adapter, with which it is served."""
    file = folder / "adapter_config.json"
    if not file.exists():
        return None
    try:
        base = json.loads(file.read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = "its base model"
    flags = f"--enable-lora --lora-modules NAME={folder}"
    return f"a LoRA adapter, not a model: serve {base} with {flags}"


@hookimpl
def modulm_adapter_bank(config: EngineConfig, platform: Platform, ops: Ops) -> AdapterBank | None:
    """Create the bank of the flags."""
    flags = config.group(LoRAConfig)
    if not flags.enable_lora:
        return None
    modules = flags.lora_target_modules
    table = {
        "max_loras": flags.max_loras,
        "max_lora_rank": flags.max_lora_rank,
        "max_cpu_loras": flags.max_cpu_loras or max(_HELD, flags.max_loras),
        "lora_dtype": flags.lora_dtype,
        "lora_target_modules": None if modules is None else list(modules),
        "fully_sharded_loras": flags.fully_sharded_loras,
    }
    plugins = manager.current()
    bank: AdapterBank = plugins.load("adapters", _BANK)(
        plugins.options("adapters", _BANK, table), platform, ops
    )
    return bank
