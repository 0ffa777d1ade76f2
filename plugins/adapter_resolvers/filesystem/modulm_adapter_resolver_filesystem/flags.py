"""The flag of the filesystem resolver."""

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["AdapterFolderConfig"]


@flag_group
class AdapterFolderConfig(FlagGroup):
    """Adapters that are loaded from a folder when a request first names them."""

    title = "Adapters in a folder"
    server = True

    lora_resolver_folder: str | None = flag(
        None,
        "Folder with one subfolder per adapter; the subfolder's name is the adapter's.",
        unit="path",
    )
