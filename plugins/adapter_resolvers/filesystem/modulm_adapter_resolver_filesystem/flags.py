"""The flag of this resolver."""

from modulm.config.schema.flags import FlagGroup, flag, flag_group

__all__ = ["AdapterFolderConfig"]


@flag_group
class AdapterFolderConfig(FlagGroup):
    """Adapters that are loaded from a folder when a request first names them."""

    title = "Adapters in a folder"
    server = True

    lora_resolver_folder: str | None = flag(
        None, "Folder of adapters, each in a folder of its own, which is its name.", unit="path"
    )
