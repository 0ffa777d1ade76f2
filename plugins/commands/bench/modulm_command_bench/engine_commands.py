"""The commands `startup` and `mm-processor`, which import their code on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from modulm_cli import FlagCommand, print_notices
from modulm_command_bench.dataset_options import media_options

if TYPE_CHECKING:
    from modulm.config.sources import Draft

__all__ = ["mm_processor", "startup"]


@click.command("startup", cls=FlagCommand)
@click.option(
    "--num-iters-cold", type=click.IntRange(min=0), default=3, show_default=True,
    help="Number of starts with empty caches.",
)  # fmt: skip
@click.option(
    "--num-iters-warmup", type=click.IntRange(min=0), default=1, show_default=True,
    help="Number of starts before those with filled caches.",
)  # fmt: skip
@click.option(
    "--num-iters-warm", type=click.IntRange(min=0), default=3, show_default=True,
    help="Number of starts with filled caches.",
)  # fmt: skip
@click.option("--output-json", metavar="FILE", help="Save the result as JSON.")
def startup(draft: Draft, **options: Any) -> None:
    """Measure starts, with empty and with filled caches."""
    from modulm_command_bench.figures import save
    from modulm_command_bench.starting import startup as measure

    print_notices(draft.notices)
    result = measure(
        draft.config,
        cold=options["num_iters_cold"],
        warmups=options["num_iters_warmup"],
        warm=options["num_iters_warm"],
    )
    if options["output_json"]:
        save(options["output_json"], result)


@click.command("mm-processor", cls=FlagCommand)
@click.option(
    "--dataset-name", type=click.Choice(["random-mm", "custom_image", "custom_audio", "hf"]),
    default="random-mm", show_default=True, help="Dataset of the prompts.",
)  # fmt: skip
@click.option("--dataset-path", metavar="FILE", help="File of the dataset, or its id on the Hub.")
@click.option("--num-prompts", type=int, default=10, show_default=True, help="Number of prompts.")
@click.option(
    "--num-warmups",
    type=int,
    default=1,
    show_default=True,
    help="Prompts before those measured.",
)
@click.option(
    "--input-len", type=int, default=32, show_default=True, help="Tokens of text per prompt."
)
@click.option(
    "--metric-percentiles", default="99", show_default=True, help="Percentiles to report: 50,99."
)
@click.option("--disable-tqdm", is_flag=True, help="Show no progress bar.")
@click.option("--output-json", metavar="FILE", help="Save the result as JSON.")
@media_options
def mm_processor(draft: Draft, **options: Any) -> None:
    """Measure decoding, processing and encoding of media."""
    from modulm_command_bench.figures import save
    from modulm_command_bench.load_options import percentiles_of
    from modulm_command_bench.media_samples import random_media
    from modulm_command_bench.processing import measure_processor
    from modulm_command_bench.recorded import RecordedOptions
    from modulm_command_bench.samples import Recipe

    print_notices(draft.notices)
    recipe = Recipe(
        name=options["dataset_name"],
        path=options["dataset_path"],
        count=options["num_prompts"],
        input_len=options["input_len"],
        media=random_media(options),
        recorded=RecordedOptions(hub_subset=options["hf_subset"], hub_split=options["hf_split"]),
    )
    result = measure_processor(
        draft.config,
        recipe,
        warmups=options["num_warmups"],
        percentiles=percentiles_of(options["metric_percentiles"]),
        quiet=options["disable_tqdm"],
    )
    if options["output_json"]:
        save(options["output_json"], result)
