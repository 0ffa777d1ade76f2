"""`modulm quantize MODEL OUT --scheme w4a16`: quantizes a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modulm.errors import CheckpointError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from modulm.contracts.loader import StoredTensor
    from modulm.contracts.quantization import LinearSpec
    from modulm_command_quantize.data import Texts
    from modulm_command_quantize.work import Source

__all__ = ["command"]

_SCHEMES = ("w4a16", "w4a16-asym", "w8a16", "w8a8", "w4a8", "fp8")
#: Maximum number of tokens to evaluate perplexity on.
_MEASURED = 16_384


@click.command("quantize")
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--scheme",
    type=click.Choice(_SCHEMES),
    required=True,
    help="Data types of weights and activations.",
)
@click.option(
    "--method",
    type=click.Choice(("rtn", "gptq", "awq")),
    default="rtn",
    show_default=True,
    help="rtn: round to nearest; gptq: GPTQ; awq: AWQ. The last two need calibration data.",
)
@click.option(
    "--group-size",
    type=click.IntRange(min=8),
    help="Number of weights that share a scale, with four bits. [128]",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Layers that are not quantized: a path, its end, or re:...; repeatable.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Calibration data: text, or JSON lines with a text each. Default: that of an installed "
    "model.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Number of calibration samples.",
)
@click.option(
    "--length",
    type=click.IntRange(min=8),
    default=512,
    show_default=True,
    help="Tokens of a sample.",
)
@click.option(
    "--perplexity/--no-perplexity", default=True, help="Measure perplexity before and after."
)
def command(
    model: str,
    out: Path,
    scheme: str,
    method: str,
    group_size: int | None,
    ignore: tuple[str, ...],
    data: Path | None,
    samples: int,
    length: int,
    perplexity: bool,
) -> None:
    """Quantize the linear layers of MODEL and write it to the folder OUT.

    The format is that of compressed-tensors. Repeat the command to continue an interrupted run.
    """
    from tqdm import tqdm

    from modulm.plugins import manager
    from modulm_command_quantize.data import read_texts
    from modulm_command_quantize.output import Output
    from modulm_command_quantize.schemes import SCHEMES
    from modulm_command_quantize.work import Job

    chosen = SCHEMES[scheme]
    if group_size is not None and not chosen.group:
        raise ConfigError("group_size", f"{scheme} has a scale per output, not per group")
    source = _source(model)
    job = Job(source, chosen.sized(group_size), method, ignore)
    texts = None
    if perplexity or method != "rtn":
        texts = read_texts(data, _tokenizer(source.folder), manager.current(), length, _MEASURED)
        if texts is None:
            raise ConfigError("data", "no installed model has calibration text: use --data")
    rows = texts.rows(samples, length) if texts is not None and method != "rtn" else []
    steps = source.steps()
    settings = {"model": str(source.folder), "scheme": scheme, "method": method, "rows": rows}
    settings |= {"group_size": group_size, "ignore": list(ignore)}
    output = Output.begin(out, len(steps), settings)
    before = _perplexity(source.folder, texts) if perplexity and texts else None
    with tqdm(total=len(steps), desc="layers", unit="layer") as bar:
        job.run(output, rows, lambda step: bar.update(step + 1 - bar.n))
    table = job.scheme.table(job.left)
    output.finish(source.folder, {**source.config, "quantization_config": table}, _names(output))
    click.echo(
        f"{out}: {len(job.coded)} layers quantized to {scheme} with {method}, {len(job.left)} "
        "unchanged"
    )
    if before is not None and texts is not None:
        after = _perplexity(out, texts)
        click.echo(f"perplexity: {before:.4f} before, {after:.4f} after ({after / before:.4f})")


def _source(model: str) -> Source:
    """Open the checkpoint. Raises CheckpointError, UnsupportedError."""
    from modulm.config import EngineConfig
    from modulm.loading import resolve_checkpoint
    from modulm.loading.model import build_model
    from modulm.plugins import manager
    from modulm_command_quantize.work import Source

    plugins = manager.current()
    opened = resolve_checkpoint(EngineConfig.from_keywords(model=model), plugins)
    checkpoint = opened.checkpoint
    if checkpoint.info.quantization:
        method = checkpoint.info.quantization.get("quant_method")
        raise UnsupportedError(
            f"{model} is already quantized ({method}): use the unquantized checkpoint"
        )
    config = opened.resolved.config
    index, linear = _linear(build_model(config, checkpoint, opened.platform, plugins))
    files = {stored.file for stored in index.values()}
    other = [file for file in files if not file.endswith(".safetensors")]
    if other or not checkpoint.path.is_dir():
        raise CheckpointError(f"{checkpoint.path}: *.safetensors files are required, not {other}")
    stacked = [
        name for name, spec in linear.items() if len(index[name].shape) != 2 and spec.experts
    ]
    if stacked:
        raise UnsupportedError(f"{stacked[0]}: stacks of experts in one tensor: not supported yet")
    paths = {name: checkpoint.path / stored.file for name, stored in index.items()}
    return Source(checkpoint.path, checkpoint.config, paths, linear)


def _linear(built: Any) -> tuple[Mapping[str, StoredTensor], dict[str, LinearSpec]]:
    """The stored tensors, and those that are weights of linear layers. Reads no data."""
    import torch

    from modulm.nn import Linear

    slots = [s for u in built.shared.units for s in u.slots if s.attribute == "weight"]
    modules = [(part.name, s.module) for s in slots for way in s.ways for part in way]
    specs = {name: module.spec for name, module in modules if isinstance(module, Linear)}
    index, specs_by_tensor = built.loader.index(), {}
    names = built.model.weights(built.settings)
    for stored in index.values():
        blank = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")
        pieces = list(names.apply(stored.name, blank))
        if len(pieces) == 1 and pieces[0][0] in specs:
            specs_by_tensor[stored.name] = specs[pieces[0][0]]
    return index, specs_by_tensor


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _names(output: Any) -> Sequence[Sequence[str]]:
    """The tensor names in each file."""
    from safetensors import safe_open

    names_by_step = []
    for step in range(output.total):
        with safe_open(output.file(step), framework="pt") as opened:
            names_by_step.append(list(opened.keys()))
    return names_by_step


def _perplexity(folder: Path, texts: Texts) -> float:
    """Compute the perplexity of the evaluation texts with the engine."""
    from modulm import LLM, SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": list(text)} for text in texts.measured]
    longest = max(len(text) for text in texts.measured)
    losses: list[float] = []
    with LLM(str(folder), max_model_len=longest + 1, enable_prefix_caching=False) as engine:
        for text, output in zip(
            texts.measured, engine.generate(prompts, params, use_tqdm=False), strict=True
        ):
            pairs = list(zip(text, output.prompt_logprobs or (), strict=True))[1:]
            losses += [-logprobs[token].logprob for token, logprobs in pairs]
    return math.exp(sum(losses) / len(losses))
