"""The cost of adapters: steps of a model with and without them, in one run.

Times a step of many rows on the shape of Qwen3-0.6B with random weights (`--layers` reduces their
number): without a bank, with a bank that no row uses, with one adapter on all rows, and with eight
different ones. The cases alternate, so that other load on the machine affects all of them. Run:

    python bench/adapters.py [--rows 32] [--rank 16] [--steps 40] [--layers 28] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from modulm.config import EngineConfig
from modulm.contracts.executor import Plan, RowStart
from modulm.contracts.sampling import SamplingParams
from modulm.engine.core.engine_core import EngineCore
from modulm.plugins import manager
from modulm.testing.adapters import write_lora
from modulm_adapters.step.values import AdapterRow

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 1024, 3072, 16, 8, 128
MODULES = {
    "self_attn.q_proj": (HIDDEN, HEADS * SIZE),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * SIZE),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * SIZE),
    "self_attn.o_proj": (HEADS * SIZE, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
MOST, PROMPT = 8, 8


def shape(layers: int) -> dict[str, object]:
    """config.json of the model."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": SIZE, "vocab_size": 151936,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip


def _used(adapter: str | None) -> dict[str, AdapterRow]:
    return {} if adapter is None else {"adapters": AdapterRow(adapter)}


class Rows:
    """Rows of one worker that decode step by step, with the adapters `adapters[row]`."""

    def __init__(self, worker: object, rows: int, adapters: list[str | None]) -> None:
        self.runner = worker.runner
        self.rows = np.arange(rows, dtype=np.int32)
        self.at, self.adapters = 0, adapters
        sizes = [group.block_size for group in self.runner.capacity.groups]
        each = [-(-2048 // size) for size in sizes]
        self.tables = tuple(
            (1 + n * np.arange(rows)[:, None] + np.arange(n)).astype(np.int32) for n in each
        )
        names = sorted({name for name in adapters if name is not None})
        self.step(PROMPT, fill=tuple(enumerate(names, 1)), admit=True)

    def step(
        self, count: int = 1, fill: tuple[tuple[int, str], ...] = (), admit: bool = False
    ) -> None:
        """Run `count` tokens of every row."""
        rows = len(self.rows)
        params = SamplingParams(temperature=0)
        none, prompt = np.zeros(0, np.int64), np.arange(PROMPT)
        starts = tuple(
            RowStart(row, f"r{row}", params, prompt, none, parts=_used(self.adapters[row]))
            for row in range(rows)
        )
        plan = Plan(
            step=self.at, rows=self.rows, starts=np.full(rows, self.at, np.int32),
            counts=np.full(rows, count, np.int32), tokens=np.arange(rows * count) % 1000 + 5,
            tables=self.tables, samples=np.ones(rows, bool), admit=starts if admit else (),
            parts={"adapters": fill} if fill else {},
        )  # fmt: skip
        self.runner.run(plan)
        self.at += count

    def leave(self) -> None:
        """Release the rows."""
        none, rows = np.zeros(0, np.int32), tuple(self.rows.tolist())
        tokens, samples = none.astype(np.int64), none.astype(bool)
        self.runner.run(Plan(0, none, none, none, tokens, (), samples, release=rows))


def open_core(folder: Path, rows: int, dtype: str, **more: object) -> EngineCore:
    """Create an engine for the model's shape with dummy weights."""
    blocks = rows * 2048 // 16 + 1
    config = EngineConfig.from_keywords(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype=dtype,
        max_model_len=2048, max_num_seqs=rows, num_gpu_blocks_override=blocks, **more,
    )  # fmt: skip
    return EngineCore(config, manager.current(), _Nobody(), "bench")


class _Nobody:
    """A front end that ignores all events."""

    def events(self, events: object) -> None: ...

    def died(self, error: object) -> None: ...


def timed(step: Callable[[], None]) -> float:
    """Time one step in milliseconds."""
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run(Path(place), options)


def run(place: Path, options: argparse.Namespace) -> None:
    """Run the benchmark and print the table."""
    folder = place / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape(options.layers)))
    bank = {"enable_lora": True, "max_loras": MOST, "max_lora_rank": max(16, options.rank)}
    plain = open_core(folder, options.rows, options.dtype)
    core = open_core(folder, options.rows, options.dtype, **bank)
    reading = []
    for number in range(MOST):
        modules = {
            f"model.layers.{layer}.{name}": size
            for layer in range(options.layers)
            for name, size in MODULES.items()
        }
        path = write_lora(place / f"a{number}", modules, options.rank, number)
        reading.append(timed(lambda n=number, p=path: core.executor.add_adapter(f"a{n}", p)))
    eight = [f"a{row % MOST}" for row in range(options.rows)]
    kinds = {
        "no bank": (plain, [None] * options.rows),
        "unused": (core, [None] * options.rows),
        "one adapter": (core, ["a0"] * options.rows),
        "eight adapters": (core, eight),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    turn = 8
    for begun in range(0, options.steps + turn, turn):
        for name, (engine, adapters) in kinds.items():
            rows = Rows(engine.executor._worker, options.rows, adapters)
            rows.step()
            found = [timed(rows.step) for _ in range(turn)]
            times[name] += found if begun else []
            rows.leave()
    base, least = statistics.median(times["no bank"]), min(times["no bank"])
    print(f"{options.rows} rows, rank {options.rank}, {options.layers} layers, {options.dtype}")
    print(f"{'step':<16} {'median ms':>10} {'of plain':>9} {'best ms':>10} {'of plain':>9}")
    for name, found in times.items():
        median = statistics.median(found)
        best = min(found)
        print(
            f"{name:<16} {median:>10.2f} {base / median:>9.3f} {best:>10.2f} {least / best:>9.3f}"
        )
    print(f"reading an adapter: {statistics.median(reading):.0f} ms beside the steps")
    for engine in (plain, core):
        engine.stop()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
