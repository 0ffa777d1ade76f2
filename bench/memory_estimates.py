"""`modulm fit` against what is held after loading, over all families of the contract kit.

Usage: python bench/memory_estimates.py [--steps] [ARCHITECTURE ...] > table.md

With --steps: the activations of a step against the most that the step of a whole prompt allocates.
Each family's tiny checkpoint is loaded as stored and in formats at load, on one rank and as each of
two ranks. Formats that a layout does not support are left out.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import transformers

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.engine.worker.model_runner import ModelRunner
from modulm.errors import ModulmError
from modulm.plugins import manager
from modulm.testing.models import tiny_folder
from modulm.testing.oracles import oracle_of
from modulm_memory.allocations import Allocations
from modulm_memory.estimate import estimate
from modulm_memory.testing import measured

FORMATS = (None, "int8", "int4", "fp8")
#: Tokens of the prompt whose step is measured.
_TOKENS = 255
_HEADS = (
    (("| architecture | weights | rank | weights | held | caches | held | step | held | error "
     "| error of all |"), "|---|---|---|---|---|---|---|---|---|---|---|"),
    ("| architecture | tokens | estimate | most at once | error |", "|---|---|---|---|---|"),
)  # fmt: skip


def rows(architecture: str, number: int) -> Iterator[str]:
    """Yield the table's rows of one architecture: as stored, and in one format, which rotates."""
    plugins = manager.current()
    driver = plugins.load("models", architecture)
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_folder(driver, Path(name) / "x", oracle=oracle_of(driver), dtype="bfloat16")
        for quantization, ranks in ((None, 1), (FORMATS[1 + number % 3], 2)):
            config = EngineConfig.from_keywords(
                model=str(folder),
                quantization=quantization,
                tensor_parallel_size=ranks,
                num_gpu_blocks_override=8,
                use_tqdm_on_load=False,
            )
            try:
                found = estimate(config, plugins)
            except ModulmError as error:
                sys.stderr.write(f"{architecture} on {ranks} ranks: {error}\n")
                continue
            for rank in found.ranks:
                tokens = min(found.length - 1, _TOKENS)
                held = measured(config, plugins, rank.rank, rank.sizing.blocks, tokens)
                total = rank.fixed + rank.cache_bytes + (step := rank.widths.step(tokens, 1))
                off = 100 * (total / (held.weights + held.caches + held.step) - 1)
                yield (
                    f"| {architecture} | {quantization or 'as stored'} "
                    f"| {rank.rank + 1} of {ranks} "
                    f"| {rank.fixed:,} | {held.weights:,} "
                    f"| {rank.cache_bytes:,} | {held.caches:,} "
                    f"| {step:,} | {held.step:,} | {100 * (step / held.step - 1):+.1f} % "
                    f"| {off:+.2f} % |"
                )


def step(architecture: str, number: int) -> Iterator[str]:
    """Yield the row of one architecture's activations."""
    plugins = manager.current()
    driver = plugins.load("models", architecture)
    peaks: list[int] = []
    run = ModelRunner.run

    def measured_run(runner: ModelRunner, plan: Any) -> Any:
        with Allocations() as allocations:
            result = run(runner, plan)
        peaks.append(allocations.peak)
        return result

    with tempfile.TemporaryDirectory() as name:
        folder = tiny_folder(driver, Path(name) / "x", oracle=oracle_of(driver), dtype="bfloat16")
        flags: dict[str, Any] = {
            "kv_cache_memory_bytes": 1 << 24,
            "max_num_seqs": 1,
            "use_tqdm_on_load": False,
        }
        llm = LLM(str(folder), **flags)
        if "generate" not in llm.info.tasks:
            llm.shutdown()
            return
        tokens = min(llm.info.max_model_len - 1, _TOKENS)
        (rank,) = estimate(llm.info.config, plugins).ranks
        with patch.object(ModelRunner, "run", measured_run):
            params = SamplingParams(max_tokens=1, temperature=0)
            llm.generate([{"prompt_token_ids": [5] * tokens}], params, use_tqdm=False)
        llm.shutdown()
    expected, peak = rank.widths.step(tokens, 1), max(peaks)
    off = 100 * (expected / peak - 1)
    yield f"| {architecture} | {tokens} | {expected:,} | {peak:,} | {off:+.1f} % |"


def main(names: list[str]) -> None:
    """Print the table."""
    transformers.utils.logging.set_verbosity_error()
    make = step if "--steps" in names else rows
    names = [name for name in names if name != "--steps"]
    declared = manager.current().names("models")
    targets = {each.target: each.name for each in sorted(declared, key=lambda d: d.name)}
    print(*_HEADS[make is step], sep="\n")
    for number, name in enumerate(names or sorted(targets.values())):
        try:
            for row in make(name, number):
                print(row, flush=True)
        except Exception as error:
            sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
