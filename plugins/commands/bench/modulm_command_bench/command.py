"""The `bench` group and the options of its commands, which import their code on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from modulm.errors import ConfigError
from modulm_cli import FlagCommand, print_notices
from modulm_command_bench.dataset_options import dataset_options
from modulm_command_bench.engine_commands import mm_processor, startup
from modulm_command_bench.load_options import metrics_of, percentiles_of, schedule_of
from modulm_command_bench.result_commands import compare, plot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm.config.sources import Draft

__all__ = ["command"]

_DATASETS = (
    "random", "sharegpt", "sonnet", "burstgpt", "prefix_repetition", "custom", "hf", "spec_bench",
    "speed_bench", "timed_trace",
)  # fmt: skip
_SERVED = (*_DATASETS, "random-mm", "random-rerank", "custom_mm", "custom_image", "custom_audio")
_BACKENDS = (
    "modulm", "vllm", "openai", "openai-chat", "openai-responses", "openai-embeddings",
    "openai-embeddings-chat", "openai-embeddings-clip", "openai-embeddings-vlm2vec",
    "infinity-embeddings", "infinity-embeddings-clip", "openai-audio", "vllm-pooling",
    "vllm-rerank",
)  # fmt: skip
_METRICS = "ttft,tpot,itl"


class _ListCommand(click.Command):
    """Options that may be repeated also take several values: `--goodput ttft:200 tpot:50`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from modulm_cli.arguments import Shapes, normalize

        options = [param for param in self.params if isinstance(param, click.Option)]
        valued = {name for option in options if not option.is_flag for name in option.opts}
        shapes = Shapes(
            tables=frozenset(),
            lists=frozenset(option.opts[0] for option in options if option.multiple),
            takes_value=valued.__contains__,
        )
        try:
            return super().parse_args(ctx, normalize(args, shapes)[0])
        except ConfigError as error:
            raise click.UsageError(str(error), ctx) from error


@click.group("bench")
def command() -> None:
    """Measure latency, throughput, starts and serving; compare and plot results."""


command.add_command(startup)
command.add_command(mm_processor)
command.add_command(compare)
command.add_command(plot)


@command.command("latency", cls=FlagCommand)
@click.option("--input-len", type=int, default=32, show_default=True, help="Tokens per prompt.")
@click.option("--output-len", type=int, default=128, show_default=True, help="Tokens per output.")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Prompts per batch.")
@click.option("--n", type=int, default=1, show_default=True, help="Outputs per prompt.")
@click.option("--use-beam-search", is_flag=True, help="Use beam search with --n beams.")
@click.option(
    "--num-iters-warmup", type=int, default=10, show_default=True, help="Number of warm-up runs."
)
@click.option(
    "--num-iters", type=int, default=30, show_default=True, help="Number of measured runs."
)
@click.option("--profile", is_flag=True, help="Profile one batch instead of measuring it.")
@click.option(
    "--profile-output",
    default="modulm-profile.json",
    show_default=True,
    help="File for the trace of --profile.",
)
@click.option("--output-json", metavar="FILE", help="Save the result as JSON.")
@click.option("--disable-detokenize", is_flag=True, help="Do not detokenize the outputs.")
def latency(draft: Draft, **options: Any) -> None:
    """Measure the latency of one batch of requests, repeatedly."""
    from modulm_command_bench.figures import save
    from modulm_command_bench.offline import Latency
    from modulm_command_bench.offline import latency as measure

    print_notices(draft.notices)
    flags = Latency(
        input_len=options["input_len"],
        output_len=options["output_len"],
        batch_size=options["batch_size"],
        n=options["n"],
        iterations=options["num_iters"],
        warmups=options["num_iters_warmup"],
        beams=options["use_beam_search"],
        detokenize=not options["disable_detokenize"],
        profile=options["profile_output"] if options["profile"] else None,
    )
    result = measure(draft.config, flags)
    if options["output_json"] and result:
        save(options["output_json"], result)


@command.command("throughput", cls=FlagCommand)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    default=("modulm",),
    type=click.Choice(["modulm", "vllm", "vllm-chat", "hf", "mii"]),
    help="What to measure: this engine or transformers (hf); name both to compare.",
)
@click.option(
    "--dataset-name",
    type=click.Choice(_DATASETS),
    default="random",
    show_default=True,
    help="Dataset of the prompts.",
)
@click.option("--dataset", metavar="FILE", help="Deprecated: a ShareGPT file; use --dataset-path.")
@click.option("--dataset-path", metavar="FILE", help="File of the dataset.")
@click.option("--input-len", type=int, help="Tokens per prompt.")
@click.option("--output-len", type=int, help="Tokens per output; replaces the dataset's.")
@click.option("--n", type=int, default=1, show_default=True, help="Outputs per prompt.")
@click.option("--num-prompts", type=int, default=1000, show_default=True, help="Number of prompts.")
@click.option("--hf-max-batch-size", type=int, help="Batch size of transformers.")
@click.option("--output-json", metavar="FILE", help="Save the result as JSON.")
@click.option(
    "--async-engine", is_flag=True, help="Use the asynchronous engine, as the server does."
)
@click.option(
    "--disable-frontend-multiprocessing",
    is_flag=True,
    help="With --async-engine: engine and front end in one process.",
)
@click.option("--disable-detokenize", is_flag=True, help="Do not detokenize the outputs.")
@click.option(
    "--lora-path", metavar="DIR", help="Adapter that all prompts use, with --enable-lora."
)
@click.option(
    "--prefix-len",
    type=int,
    default=0,
    show_default=True,
    help="Tokens that all random prompts share.",
)
@click.option(
    "--random-range-ratio",
    type=float,
    default=0.0,
    show_default=True,
    help="Spread of random lengths, 0 to 1.",
)
@click.option("--hf-subset", help="Subset of a dataset of the Hub. Default: its first.")
@click.option("--hf-split", help="Split of a dataset of the Hub. Default: test, or its first.")
@click.option("--prefix-repetition-prefix-len", type=int, help="Tokens of each prefix.")
@click.option("--prefix-repetition-suffix-len", type=int, help="Tokens after a prefix.")
@click.option("--prefix-repetition-num-prefixes", type=int, help="Number of prefixes.")
@click.option("--prefix-repetition-output-len", type=int, help="Tokens per output.")
def throughput(draft: Draft, **options: Any) -> None:
    """Measure throughput over many prompts."""
    from modulm_command_bench.figures import save
    from modulm_command_bench.offline import throughput as measure

    print_notices(draft.notices)
    if options["dataset"]:
        click.echo("note: --dataset is deprecated: use --dataset-path", err=True)
        options["dataset_path"] = options["dataset_path"] or options["dataset"]
        options["dataset_name"] = "sharegpt"
    config = draft.config
    if options["lora_path"] and "hf" in options["backends"]:
        raise click.UsageError("--lora-path cannot be used with transformers (--backend hf)")
    if options["disable_frontend_multiprocessing"]:
        config = config.with_(disable_frontend_multiprocessing=True)
    result = measure(
        config,
        _own(options["backends"], options["async_engine"]),
        _recipe(options, draft.config.model.seed),
        n=options["n"],
        hf_batch=options["hf_max_batch_size"],
        detokenize=not options["disable_detokenize"],
        adapter=options["lora_path"],
    )
    if options["output_json"]:
        save(options["output_json"], result)


def _own(backends: tuple[str, ...], asynchronous: bool) -> list[str]:
    """Return the supported backends; vLLM's names mean this engine."""
    if "mii" in backends:
        raise click.UsageError("--backend mii: refused; run DeepSpeed-MII's own benchmark")
    here = "async" if asynchronous else "modulm"
    return list(dict.fromkeys("hf" if name == "hf" else here for name in backends))


def _recipe(options: dict[str, Any], seed: int) -> Any:
    """The prompt recipe of a command's options."""
    from modulm_command_bench.media_samples import random_media
    from modulm_command_bench.samples import Recipe

    name = options["dataset_name"]
    repeated = name == "prefix_repetition"
    prefix = options.get("prefix_repetition_prefix_len") if repeated else options.get("prefix_len")
    return Recipe(
        name=name,
        path=options["dataset_path"],
        count=options["num_prompts"],
        input_len=options.get("prefix_repetition_suffix_len") if repeated else options["input_len"],
        output_len=(
            options.get("prefix_repetition_output_len") or options["output_len"]
            if repeated
            else options["output_len"]
        ),
        prefix_len=prefix or 0,
        range_ratio=options["random_range_ratio"],
        prefixes=options.get("prefix_repetition_num_prefixes") or 10,
        shuffle=not options.get("disable_shuffle", False),
        oversample=not options.get("no_oversample", False),
        seed=seed,
        media=random_media(options),
        recorded=_recorded(options),
        batch=options.get("random_batch_size") or 1,
    )


def _recorded(options: dict[str, Any]) -> Any:
    """The options of datasets in published formats; those that a command lacks by default."""
    from modulm_command_bench.recorded import RecordedOptions

    def labelled(key: str, default: str) -> str:
        return options.get(f"timed_trace_label_{key}") or default

    categories = {"spec_bench": "spec_bench_category", "speed_bench": "speed_bench_category"}
    return RecordedOptions(
        category=options.get(categories.get(options["dataset_name"], "")),
        subset=options.get("speed_bench_dataset_subset") or "qualitative",
        chunk=options.get("timed_trace_chunk_hash_size") or 16,
        seconds=options.get("timed_trace_sec_multiplier") or 1.0,
        labels=(
            labelled("timestamp", "timestamp"), labelled("input_length", "input_length"),
            labelled("output_length", "output_length"), labelled("hash_ids", "hash_ids"),
        ),
        hub_subset=options.get("hf_subset"),
        hub_split=options.get("hf_split"),
    )  # fmt: skip


@command.command("serve", cls=_ListCommand)
@click.option(
    "--backend",
    "--endpoint-type",
    type=click.Choice(_BACKENDS),
    default="openai",
    show_default=True,
    help="API to benchmark.",
)
@click.option("--base-url", help="Address of the server, without /v1; replaces --host and --port.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Host of the server.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port of the server.")
@click.option("--endpoint", metavar="PATH", help="Path of the API. Default: the backend's.")
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help="Header to add to requests; repeatable.",
)
@click.option("--extra-body", metavar="JSON", help="Keys to add to every request.")
@click.option("--model", help="Model to request, and its tokenizer. Default: the server's first.")
@click.option("--served-model-name", help="Name of the model in requests, if it differs.")
@click.option(
    "--lora-modules",
    multiple=True,
    metavar="NAME",
    help="Adapters of the server; each request uses one of them, at random.",
)
@click.option("--tokenizer", help="Tokenizer for counting tokens: a folder, short name or id.")
@click.option(
    "--tokenizer-mode", default="auto", show_default=True, help="Tokenizer implementation."
)
@click.option(
    "--trust-remote-code", is_flag=True, help="Allow Python code from the tokenizer to run."
)
@click.option(
    "--dataset-name",
    type=click.Choice(_SERVED),
    default="random",
    show_default=True,
    help="Dataset of the prompts.",
)
@click.option("--dataset-path", metavar="FILE", help="File of the dataset.")
@click.option(
    "--num-prompts", type=int, default=1000, show_default=True, help="Number of requests."
)
@click.option(
    "--no-oversample",
    is_flag=True,
    help="Do not repeat a dataset with fewer prompts than --num-prompts.",
)
@click.option("--disable-shuffle", is_flag=True, help="Do not shuffle the dataset.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of prompts and arrival times."
)
@click.option("--input-len", type=int, help="Tokens per prompt, for any dataset.")
@click.option("--output-len", type=int, help="Tokens per output, for any dataset.")
@click.option(
    "--random-input-len",
    type=int,
    default=1024,
    show_default=True,
    help="Tokens per prompt of random.",
)
@click.option(
    "--random-output-len",
    type=int,
    default=128,
    show_default=True,
    help="Tokens per output of random.",
)
@click.option(
    "--random-range-ratio",
    type=float,
    default=0.0,
    show_default=True,
    help="Spread of random lengths, 0 to 1.",
)
@click.option(
    "--random-prefix-len",
    type=int,
    default=0,
    show_default=True,
    help="Tokens that all random prompts share.",
)
@dataset_options
@click.option("--sharegpt-output-len", type=int, help="Tokens per output of sharegpt.")
@click.option("--custom-output-len", type=int, help="Tokens per output of custom.")
@click.option(
    "--prefix-repetition-prefix-len", type=int, default=256, help="Tokens of each prefix."
)
@click.option(
    "--prefix-repetition-suffix-len", type=int, default=256, help="Tokens after a prefix."
)
@click.option("--prefix-repetition-num-prefixes", type=int, default=10, help="Number of prefixes.")
@click.option("--prefix-repetition-output-len", type=int, default=128, help="Tokens per output.")
@click.option(
    "--request-rate",
    type=float,
    default=float("inf"),
    show_default=True,
    help="Requests per second; inf: all at once.",
)
@click.option(
    "--burstiness",
    type=float,
    default=1.0,
    show_default=True,
    help="Distribution of arrivals: 1 is a Poisson process, less is burstier, more is steadier.",
)
@click.option("--max-concurrency", type=int, help="Maximum concurrent requests.")
@click.option(
    "--ramp-up-strategy",
    type=click.Choice(["linear", "exponential"]),
    help="How the request rate changes during the run.",
)
@click.option("--ramp-up-start-rps", type=float, help="Request rate at the start of the ramp.")
@click.option("--ramp-up-end-rps", type=float, help="Request rate at the end of the ramp.")
@click.option(
    "--replay-times",
    is_flag=True,
    help="Send the requests of burstgpt at their recorded times, as those of timed_trace are.",
)
@click.option("--ignore-eos", is_flag=True, help="Ignore end-of-sequence tokens.")
@click.option("--temperature", type=float, help="Sampling temperature. Default: 0.")
@click.option("--top-p", type=float, help="Probability mass to sample from.")
@click.option("--top-k", type=int, help="Number of tokens to sample from.")
@click.option("--min-p", type=float, help="Minimum probability, relative to the best token's.")
@click.option("--logprobs", type=int, help="Number of log probabilities to request.")
@click.option(
    "--percentile-metrics",
    default=_METRICS,
    show_default=True,
    help="Metrics to report: ttft, tpot, itl, e2el.",
)
@click.option(
    "--metric-percentiles",
    default="99",
    show_default=True,
    help="Percentiles to report, e.g. 50,90,99.",
)
@click.option(
    "--goodput",
    multiple=True,
    metavar="NAME:MS",
    help="Report requests per second within limits in ms: ttft:200, tpot:50, e2el:5000.",
)
@click.option(
    "--num-warmups", type=int, default=0, show_default=True, help="Number of warm-up requests."
)
@click.option(
    "--ready-check-timeout-sec",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds to wait for the server.",
)
@click.option("--disable-tqdm", is_flag=True, help="Show no progress bar.")
@click.option("--label", help="Name of this run in files and plots.")
@click.option(
    "--metadata", multiple=True, metavar="KEY=VALUE", help="Metadata to store in the result."
)
@click.option("--save-result", is_flag=True, help="Save the result as JSON.")
@click.option("--save-detailed", is_flag=True, help="Also save the times and text of each request.")
@click.option("--append-result", is_flag=True, help="Append to the result file.")
@click.option("--result-dir", metavar="DIR", help="Folder for results.")
@click.option("--result-filename", metavar="FILE", help="Name of the result file.")
def serve(**options: Any) -> None:
    """Benchmark a running OpenAI-compatible server."""
    from modulm_command_bench.serve import bench, save_result

    result = bench(
        _settings(options), _recipe(_lengths(options), options["seed"]), schedule_of(options)
    )
    if options["save_result"] or options["append_result"]:
        save_result(
            result,
            options["result_dir"],
            options["result_filename"],
            append=options["append_result"],
        )


#: Datasets that share the options of another one.
_FAMILIES = {
    "random-mm": "random", "random-rerank": "random", "custom_mm": "custom",
    "custom_image": "custom", "custom_audio": "custom",
}  # fmt: skip


def _lengths(options: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of the chosen dataset under common names; common flags take precedence."""
    name = _FAMILIES.get(options["dataset_name"], options["dataset_name"])
    chosen = {
        part: options.get(f"{name}_{part}") for part in ("input_len", "output_len", "prefix_len")
    }
    return {
        **options,
        "input_len": options["input_len"] or chosen["input_len"],
        "output_len": options["output_len"] or chosen["output_len"],
        "prefix_len": chosen["prefix_len"],
    }


def _settings(options: dict[str, Any]) -> Any:
    from modulm_command_bench.serve import Settings

    base = options["base_url"] or f"http://{options['host']}:{options['port']}"
    names = ("temperature", "top_p", "top_k", "min_p", "logprobs")
    return Settings(
        backend=options["backend"],
        base_url=base.rstrip("/").removesuffix("/v1"),
        endpoint=options["endpoint"],
        model=options["model"],
        served_model_name=options["served_model_name"],
        lora_modules=options["lora_modules"],
        tokenizer=options["tokenizer"],
        tokenizer_mode=options["tokenizer_mode"],
        trust_remote_code=options["trust_remote_code"],
        headers=options["headers"],
        extra_body=options["extra_body"],
        sampling={name: options[name] for name in names},
        ignore_eos=options["ignore_eos"],
        max_concurrency=options["max_concurrency"],
        metrics=metrics_of(options["percentile_metrics"]),
        percentiles=percentiles_of(options["metric_percentiles"]),
        goodput=options["goodput"],
        warmups=options["num_warmups"],
        ready_timeout=options["ready_check_timeout_sec"],
        quiet=options["disable_tqdm"],
        label=options["label"],
        metadata=options["metadata"],
        detailed=options["save_detailed"],
    )


#: Options that `sweep` sets itself or handles differently.
_SWEPT = frozenset(
    {"append_result", "max_concurrency", "request_rate", "result_dir", "result_filename"}
    | {"save_result"}
)


@click.option("--concurrencies", metavar="N,N", help="Run with each of these --max-concurrency.")
@click.option("--request-rates", metavar="R,R", help="Run with each of these --request-rate.")
@click.option(
    "--workload-iters",
    type=click.IntRange(min=2),
    help="Find the loads: one request at a time, all at once, and this many in all between.",
)
@click.option(
    "--workload-var",
    type=click.Choice(["request_rate", "max_concurrency"]),
    default="request_rate",
    show_default=True,
    help="What --workload-iters varies.",
)
@click.option(
    "-o",
    "--output-dir",
    default="sweep",
    show_default=True,
    help="Folder for the table and the plot.",
)
@click.option("--resume", is_flag=True, help="Keep the results in the folder; run only the others.")
def sweep(
    concurrencies: str | None,
    request_rates: str | None,
    workload_iters: int | None,
    workload_var: str,
    output_dir: str,
    resume: bool,
    **options: Any,
) -> None:
    """Run `bench serve` at several loads, and plot the results."""
    from pathlib import Path

    from modulm_command_bench.serve import bench
    from modulm_command_bench.sweep import explored, loads
    from modulm_command_bench.sweep import sweep as measure_all

    def measure(run: Mapping[str, Any]) -> dict[str, Any]:
        flags = {"max_concurrency": None, "request_rate": float("inf"), **options, **run}
        return bench(_settings(flags), _recipe(_lengths(flags), flags["seed"]), schedule_of(flags))

    if workload_iters is None:
        runs: Any = loads(concurrencies, request_rates)
    elif concurrencies or request_rates:
        raise click.UsageError("--workload-iters finds the loads: leave the lists of loads out")
    else:
        options["percentile_metrics"] += ",e2el" * ("e2el" not in options["percentile_metrics"])
        runs = explored(workload_var, workload_iters, options["num_prompts"])
    measure_all(runs, measure, Path(output_dir), resume=resume)


_sweep = command.command("sweep", cls=_ListCommand)(sweep)
_sweep.params += [option for option in serve.params if option.name not in _SWEPT]
