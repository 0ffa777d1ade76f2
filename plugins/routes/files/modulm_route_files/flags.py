"""The flags of files and batches: `config.group(FilesConfig)`."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["FilesConfig"]


@flag_group
class FilesConfig(FlagGroup):
    """Files and batches of clients."""

    title = "Files"
    server = True

    file_storage_path: str | None = flag(
        None,
        "Folder for uploaded files and batches; it outlives the server. Default: a temporary "
        "folder.",
        unit="path",
    )
    max_stored_files: int = flag(1_000, "Maximum number of stored files.", least=1)
    max_stored_bytes: int = flag(
        4 << 30,
        "Total size of stored files beyond which uploads are rejected.",
        unit="bytes",
        least=1,
    )
