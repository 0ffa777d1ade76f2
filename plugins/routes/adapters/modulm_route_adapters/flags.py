"""The flags of adapters that only a server has."""

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["ServedAdaptersConfig"]


@flag_group
class ServedAdaptersConfig(FlagGroup):
    """Which adapters a server has."""

    title = "Served adapters"
    server = True

    lora_modules: tuple[str, ...] | None = flag(
        None,
        'Adapters that are served from the start, with --enable-lora: name=path, or {"name": ..., '
        '"path": ..., "base_model_name": ...}. A path is a folder, or a repository of the hub.',
        common=True,
    )
    allow_runtime_lora_updating: bool = flag(
        False, "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter."
    )
    allowed_lora_path: tuple[str, ...] | None = flag(
        None, "Folders from which /v1/load_lora_adapter loads; None: from none.", unit="path"
    )
