"""`modulm kv`: manages the KV cache files of modulm-kv-disk."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import click

from modulm_kv_transfer import block_files as files

__all__ = ["command"]

_folder = click.option(
    "--path", "folder", type=click.Path(path_type=Path), default=files.FOLDER, show_default=True,
    help="Folder of the cache (shared_storage_path).",
)  # fmt: skip


@click.group("kv")
def command() -> None:
    """List and remove the KV cache files of modulm-kv-disk."""


@command.command("list")
@_folder
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_files(folder: Path, as_json: bool) -> None:
    """List the models with cached files: blocks and bytes of all ranks."""
    folder = folder.expanduser()
    sizes_by_model: dict[str, list[int]] = defaultdict(list)
    for file in files.scan(folder):
        sizes_by_model[file.model].append(file.size)
    rows = [
        {"model": model, "files": len(sizes), "bytes": sum(sizes)}
        for model, sizes in sorted(sizes_by_model.items())
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(f"{row['model']}  {row['files']} files  {row['bytes']} bytes")
    if not rows:
        click.echo(f"No files in {folder}.", err=True)


@command.command()
@click.argument("model", required=False)
@_folder
def clear(folder: Path, model: str | None) -> None:
    """Remove the files of MODEL (a digest from `modulm kv list`), or of all models."""
    folder = folder.expanduser()
    if model is not None and model not in files.models(folder):
        raise click.BadParameter(f"{folder} has no files of this model", param_hint="MODEL")
    click.echo(f"{files.clear(folder, model)} bytes removed")
