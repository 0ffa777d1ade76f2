"""The command `modulm tune`; importing it imports neither torch nor Triton."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

__all__ = ["command"]


def _merged(file: Path, section: str, entries: dict[str, Any]) -> dict[str, Any]:
    """Return the table in a file with a device's kernels replaced."""
    table: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return {**table, section: {**table.get(section, {}), **entries}}


@click.command("tune")
@click.argument("config", required=False, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), help="File; default: where kernels read it."
)
@click.option("--dry-run", is_flag=True, help="Tiny sizes, few candidates; writes nothing.")
def command(config: Path | None, out: Path | None, dry_run: bool) -> None:
    """Measure the Triton kernels on this GPU, and store the best constants.

    They hold for the sizes of a model. CONFIG is its config.json, or its folder; without it, sizes
    of an 8B model are used.
    """
    import torch

    from modulm_kernels_triton import device
    from modulm_kernels_triton.ahead import Sizes
    from modulm_kernels_triton.kept import keep_compiled
    from modulm_kernels_triton.tune import tune
    from modulm_kernels_triton.tuning import kept_file, section

    has_gpu = torch.cuda.is_available() or torch.xpu.is_available()
    target = torch.device(("xpu" if torch.xpu.is_available() else "cuda") if has_gpu else "cpu")
    reason = device.unusable(target)
    if reason is not None:
        raise click.ClickException(reason)
    if config is None:
        sizes = Sizes(4096, 12288, 32, 8, 128)
    else:
        file = config / "config.json" if config.is_dir() else config
        sizes = Sizes.of(json.loads(file.read_text()))
    if dry_run:
        dtype = torch.float32 if device.interpreting() else sizes.dtype
        sizes = Sizes(64, 64, 4, 2, 16, dtype, dtype)
    keep_compiled()
    entries = tune(sizes, target, tiny=dry_run, told=click.echo)
    place = out or kept_file()
    table = _merged(place, section(), entries)
    if dry_run:
        click.echo(json.dumps(table, indent=1))
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(table, indent=1) + "\n")
    click.echo(f"wrote {place}")
