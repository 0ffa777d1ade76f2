"""`modulm save-sharded MODEL OUT`: writes each rank's shard for `--load-format sharded_state`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modulm.errors import ConfigError, UnsupportedError
from modulm_tensor_files import RANK_PATTERN, unfit_pattern

if TYPE_CHECKING:
    import torch

    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.nn.weight_slots import Slot, Unit

__all__ = ["command"]


@click.command("save-sharded")
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype", default="auto", show_default=True, help="Data type, as for `modulm serve`."
)
@click.option(
    "--file-pattern", default=RANK_PATTERN, show_default=True, help="File names for each rank."
)
@click.option(
    "--max-file-size",
    type=click.IntRange(min=1),
    default=5 * 2**30,
    show_default=True,
    help="Approximate maximum size of a file, in bytes.",
)
def command(model: str, out: Path, dtype: str, file_pattern: str, max_file_size: int) -> None:
    """Write the shard of MODEL for each rank to separate files in the folder OUT.

    Each rank then reads its own files only. A quantized checkpoint keeps its format; --quantization
    of an unquantized one is applied on loading.
    """
    from modulm.config import EngineConfig
    from modulm.loading import resolve_checkpoint
    from modulm.parallel import Mesh
    from modulm.plugins import manager
    from modulm_tensor_files import replace

    reason = unfit_pattern(file_pattern)
    if reason is not None:
        raise ConfigError("file_pattern", reason)
    if out.exists() and any(out.iterdir()):
        raise ConfigError("out", f"{out} exists and is not empty")
    plugins = manager.current()
    opened = resolve_checkpoint(EngineConfig.from_keywords(model=model, dtype=dtype), plugins)
    units, loaded_as = _filled(opened, plugins)
    out.mkdir(parents=True, exist_ok=True)
    group = Mesh().tensor
    names = {"rank": str(group.rank), "ranks": str(group.size)}
    size = _write(units, out, file_pattern, names, max_file_size)
    _beside(opened.resolved.config, opened.checkpoint, out)
    table = {**opened.checkpoint.config, "dtype": loaded_as}
    replace(out / "config.json", json.dumps(table, indent=2).encode())
    click.echo(f"{out}: {size / 2**20:.1f} MiB of rank {group.rank} of {group.size}")


def _filled(opened: Any, plugins: Any) -> tuple[list[Unit], str]:
    """Load the model without repacking; returns (its modules, its dtype)."""
    from modulm.loading.model import build_model, plan_checkpoint
    from modulm.loading.weights import fill

    checkpoint, platform, config = opened.checkpoint, opened.platform, opened.resolved.config
    built = build_model(config, checkpoint, platform, plugins)
    if built.model.load(checkpoint.path):
        raise UnsupportedError(
            f"{checkpoint.architecture}: its driver reads the checkpoint itself, so it cannot "
            "be sharded"
        )
    units = built.shared.units
    for unit in units:
        unit.finish = None
    plan = plan_checkpoint(built, checkpoint)
    fill(plan, built.loader, device=platform.device, progress=True)
    return units, built.dtype


def _pieces(slot: Slot) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a parameter as the tensors of a checkpoint; nothing if it is absent."""
    parameter = slot.module._parameters.get(slot.attribute)
    if parameter is None or parameter.is_meta:
        return
    for part in slot.ways[0]:
        yield part.name, parameter.detach()[part.target]


def _write(units: list[Unit], out: Path, pattern: str, names: Mapping[str, str], most: int) -> int:
    """Write all parameters to files of about `most` bytes; returns the total bytes of tensors."""
    from safetensors.torch import save_file

    whole, tensors, size = 0, dict[str, Any](), 0

    def save(part: int) -> None:
        name = pattern.format(part=part, **names)
        save_file(tensors, out / name, {"format": "pt", "modulm_ranks": names["ranks"]})
        tensors.clear()

    part = 0
    for unit in units:
        for slot in unit.slots:
            for name, tensor in _pieces(slot):
                if tensors and size + tensor.nbytes > most:
                    save(part)
                    part, size = part + 1, 0
                tensors[name] = tensor.clone(memory_format=_contiguous())
                size += tensor.nbytes
                whole += tensor.nbytes
    save(part)
    return whole


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format


def _beside(config: EngineConfig, checkpoint: Checkpoint, out: Path) -> None:
    """Copy or write the tokenizer, template and generation settings."""
    from modulm.loading.checkpoint import stored_tokenizer
    from modulm_tensor_files import copy_beside, replace

    if checkpoint.path.is_dir():
        copy_beside(checkpoint.path, out)
    tokenizer = stored_tokenizer(config, checkpoint.path)
    if tokenizer is not None:
        replace(out / "tokenizer.json", tokenizer.tokenizer.encode())
        replace(out / "tokenizer_config.json", json.dumps(tokenizer.settings).encode())
    if checkpoint.generation_config and not (out / "generation_config.json").exists():
        content = json.dumps(checkpoint.generation_config).encode()
        replace(out / "generation_config.json", content)
