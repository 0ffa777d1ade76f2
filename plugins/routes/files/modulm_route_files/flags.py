"""The flags of files and batches: `config.group(FilesConfig)`."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["FilesConfig"]


@flag_group
class FilesConfig(FlagGroup):
    """What clients store on the server."""

    title = "Files"
    server = True

    file_storage_path: str | None = flag(
        None,
        "Folder of uploaded files and batches, which outlive the server; None: a temporary one.",
        unit="path",
    )
    max_stored_files: int = flag(1_000, "Most files that are stored.", least=1)
    max_stored_bytes: int = flag(
        4 << 30, "Bytes of stored files beyond which none is taken.", unit="bytes", least=1
    )
