"""Published quantized checkpoints compared with modulm's formats, peers and the machine's peak.

    python bench/quantized.py CHECKPOINT FOLDER --llama LLAMA_VENV/bin/python [--only PART ...]
        [--rounds N] [--json FILE] [--make]

CHECKPOINT is Qwen3-0.6B's shape in bf16; its converted formats are written to FOLDER once (`--make`
stops there). All engines of a comparison are in memory and alternate by round; a ratio is the
median over rounds. PARTs: stream (one stream, each format compared with int4 at load with the same
head, and the bandwidth that the probe measures in that round), prompt (2,048 tokens, compared with
bf16), gguf (the same file in llama.cpp), mixture (one billion weights in int4), load (compared with
reading the file).

    pip install llama-cpp-python gguf numpy     # in a venv of its own, from source
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import mixture
import published
from engines import Engine, raise_on_termination

import modulm_kernels_cpu as kernels
from modulm_kernels_cpu.linear import INTEGERS
from modulm_kernels_cpu.probe import ReadProbe

BENCH = Path(__file__).parent
VOCABULARY = 8000
NEW = 24  # tokens of a stream in each round
STREAMS = 16
PROMPT = 2048
PARTS = ("stream", "prompt", "gguf", "mixture", "load")
#: Layers that stay unquantized, as in the compared formats.
PLAIN_HEAD = {"ignore": ["lm_head"]}

Generate = Callable[[list[list[int]], int], float]


def prompts(count: int, length: int) -> list[list[int]]:
    return [[random.randrange(10, VOCABULARY) for _ in range(length)] for _ in range(count)]


def engine(model: Path, length: int, streams: int = 1, **flags: Any) -> Generate:
    """The engine on a checkpoint: a function that times prompts with `new` output tokens each."""
    from modulm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype="bfloat16",
        max_model_len=length,
        max_num_seqs=streams,
        max_num_batched_tokens=max(length, 2048),
        kv_cache_memory_bytes=512 << 20,
        enable_prefix_caching=False,
        speculative="off",
        **flags,
    )

    def generate(asked: list[list[int]], new: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in asked]
        start = time.perf_counter()
        llm.generate(given, params, use_tqdm=False)
        return time.perf_counter() - start

    return generate


class Watch:
    """Tracks the form in which linear layers were packed since the last call."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def kernels(self) -> str:
        found: Counter[str] = Counter()
        for held in gc.get_objects():
            if type(held) is kernels.PackedLinear and id(held) not in self._seen:
                self._seen.add(id(held))
                found[multiplies(held)] += held.bytes
        return ", ".join(f"{name}: {size / 1e6:.0f} MB" for name, size in found.most_common())


def multiplies(held: kernels.PackedLinear) -> str:
    if held.format in INTEGERS:
        digits = {"int8": "int8", "bf16": "two digits of int8"}[held.activations]
        return f"{held.format} x {digits}"
    return f"{held.format} x bf16"


def decoding(generate: Generate, streams: int = 1, length: int = 32, new: int = NEW) -> float:
    """Output tokens per second, without the time of the prompts."""
    asked = prompts(streams, length)
    generate(asked, 1)  # llama.cpp keeps a prompt: it has to be kept in both runs that are timed
    once = generate(asked, 1)
    return streams * new / (generate(asked, new + 1) - once)


def rounds_of(
    count: int, engines: Mapping[str, Generate], figure: Callable[[Generate], float]
) -> dict[str, list[float]]:
    """Run all engines in every round, in rotating order; the first round is dropped."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for turn in range(count + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            value = figure(engines[name])
            if turn:
                found[name].append(value)
    return found


def ratio(mine: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, other, strict=True))


def stream(options: argparse.Namespace) -> dict[str, Any]:
    """One stream in each format."""
    at_load = {"int4": {"quantization": "int4", "quantization_config": PLAIN_HEAD}}
    at_load["int4, head int8"] = {"quantization": "int4"}
    watch, engines, held = Watch(), {}, {}
    watch.kernels()
    for name, flags in at_load.items():
        engines[name] = engine(options.checkpoint, 256, **flags)
        held[name] = watch.kernels()
    for name in published.FORMATS:
        engines[name] = engine(published.make(options.checkpoint, options.folder, name), 256)
        held[name] = watch.kernels()
    probe, reads = ReadProbe(kernels.load(), 1 << 30), []
    engines_and_memory = {**engines, "read": lambda asked, new: 0.0}

    def figure(generate: Generate) -> float:
        if generate is engines_and_memory["read"]:
            reads.append(statistics.median(probe.rate() for _ in range(5)))
            return reads[-1]
        return decoding(generate)

    found = rounds_of(options.rounds, engines_and_memory, figure)
    read, rows = found.pop("read"), {}
    for name, rates in found.items():
        size = sum(float(part.split(": ")[1].split()[0]) for part in held[name].split(", "))
        share = [rate * size / 1e3 / gb for rate, gb in zip(rates, read, strict=True)]
        rows[name] = {
            "tokens/s": round(statistics.median(rates), 1),
            "to int4": round(ratio(rates, found["int4"]), 3),
            "of bandwidth": round(statistics.median(share), 3),
            "multiplies": held[name],
        }
    return {"read GB/s": round(statistics.median(read), 1), **rows}


def prompt(options: argparse.Namespace) -> dict[str, Any]:
    """A long prompt, which is compute-bound."""
    length = PROMPT + 16
    engines = {"bf16": engine(options.checkpoint, length)}
    for name in ("fp8", "ct-w8a8", "ct-w4a8", "awq"):
        engines[name] = engine(published.make(options.checkpoint, options.folder, name), length)
    found = rounds_of(
        max(3, options.rounds // 2),
        engines,
        lambda generate: PROMPT / generate(prompts(1, PROMPT), 1),
    )
    return {
        name: {
            "tokens/s": round(statistics.median(rates)),
            "to bf16": round(ratio(rates, found["bf16"]), 3),
        }
        for name, rates in found.items()
    }


class Llama:
    """llama.cpp in its own process and environment, stopped between its turns."""

    def __init__(self, options: argparse.Namespace, kind: str) -> None:
        script = BENCH / "peers" / "llama_turns.py"
        command = [options.llama, script, options.checkpoint, kind, options.folder, "serve"]
        self.engine = Engine(command, 3600)
        self.file = Path(self.engine.first["file"])

    def __call__(self, asked: list[list[int]], new: int) -> float:
        length = PROMPT + 16 if len(asked) == 1 else 128
        answer = self.engine.ask({"prompts": asked, "new": new, "length": length}, 600)
        return float(answer["seconds"])

    def close(self) -> None:
        self.engine.close()


def gguf(options: argparse.Namespace) -> dict[str, Any]:
    """The same file in both engines, alternating; prints the ratio of every round, and for one
    stream the fraction of the bandwidth that the probe measures before and after.
    """
    cases: dict[str, Callable[[Generate], float]] = {
        "one stream": decoding,
        "prompt of 2,048": lambda generate: PROMPT / generate(prompts(1, PROMPT), 1),
        "16 streams": lambda generate: decoding(generate, STREAMS),
    }
    probe = ReadProbe(kernels.load(), 1 << 30)
    found: dict[str, Any] = {}
    for kind in ("Q4_K_M", "Q8_0"):
        with closing(Llama(options, kind)) as llama:
            watch = Watch()
            watch.kernels()
            engines = {"modulm": engine(llama.file, PROMPT + 16, STREAMS), "llama.cpp": llama}
            held = watch.kernels()
            size = sum(float(part.split(": ")[1].split()[0]) for part in held.split(", "))
            found[f"{kind}, held"] = f"{held}; file: {llama.file.stat().st_size / 1e6:.0f} MB"
            for case, figure in cases.items():
                count = options.rounds if case == "one stream" else max(3, options.rounds // 2)
                before = [probe.rate() for _ in range(5)]
                rates = rounds_of(count, engines, figure)
                read = statistics.median([*before, *(probe.rate() for _ in range(5))])
                each = [
                    round(a / b, 2)
                    for a, b in zip(rates["modulm"], rates["llama.cpp"], strict=True)
                ]
                row: dict[str, Any] = {
                    **{name: round(statistics.median(all_of), 1) for name, all_of in rates.items()},
                    "times": round(ratio(rates["modulm"], rates["llama.cpp"]), 2),
                    "rounds": each,
                }
                if case == "one stream":
                    share = statistics.median(rates["modulm"]) * size / 1e3 / read
                    row |= {"read GB/s": round(read, 1), "of bandwidth": round(share, 3)}
                found[f"{kind}, {case}"] = row
        del engines
        gc.collect()
    return found


def mixed(options: argparse.Namespace) -> dict[str, Any]:
    """One billion weights in int4, of which a token reads a part."""
    folder = str(options.folder / "mixture")
    mixture.parsed([folder, "--write"])
    measured = mixture.Rounds(mixture.parsed([folder, "--quantization", "int4"]))
    return mixture.summary(measured, [measured.one() for _ in range(options.rounds)])


_READ = """
import sys, time
from safetensors import safe_open
start = time.perf_counter()
with safe_open(sys.argv[1] + "/model.safetensors", "pt") as opened:
    tensors = [opened.get_tensor(name).clone() for name in opened.keys()]
seconds = time.perf_counter() - start
"""
_LOAD = """
import sys, time
import modulm.loading.model as model
from modulm import LLM
fill, seconds = model.fill, 0.0
def timed(*given, **more):
    global seconds
    start = time.perf_counter()
    fill(*given, **more)
    seconds = time.perf_counter() - start
model.fill = timed
LLM(sys.argv[1], dtype="bfloat16", quantization=sys.argv[2] or None, max_model_len=256,
    max_num_seqs=1, kv_cache_memory_bytes=64 << 20)
"""
_REPORT = """
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
held = {key: int(status[key].split()[0]) // 1024 for key in ("VmHWM", "RssAnon")}
import json
print(json.dumps({"seconds": seconds, **held}))
"""


def load(options: argparse.Namespace) -> dict[str, Any]:
    """Time from the page cache to packed weights, each in a new process.

    `peak`: of the process: weights, other memory, and reclaimable pages of the mapped file. `held`:
    private memory at the end.
    """
    asked = {"read": (_READ, "")}
    asked |= {name or "bf16": (_LOAD, name) for name in ("", "int8", "int4", "fp8")}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in asked}
    for _ in range(3):
        for name, (code, quantization) in asked.items():
            command = [sys.executable, "-c", code + _REPORT, str(options.checkpoint), quantization]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    seconds = {name: [run["seconds"] for run in runs] for name, runs in found.items()}
    return {
        name: {
            "seconds": round(statistics.median(seconds[name]), 2),
            "to read": round(ratio(seconds[name], seconds["read"]), 2),
            "to bf16": round(ratio(seconds[name], seconds["bf16"]), 2),
            "peak MB": max(run["VmHWM"] for run in runs),
            "held MB": max(run["RssAnon"] for run in runs),
        }
        for name, runs in found.items()
    }


MEASURES = {"stream": stream, "prompt": prompt, "gguf": gguf, "mixture": mixed, "load": load}


def main() -> None:
    """Print a table for each part; write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama", help="the interpreter of llama.cpp's environment")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--make", action="store_true", help="write the checkpoints and stop")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    raise_on_termination()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in published.FORMATS:
        published.make(options.checkpoint, options.folder, name)
    if options.make:
        return
    found: dict[str, Any] = {}
    for part in options.only:
        if part == "gguf" and not options.llama:
            print("gguf: --llama is required")
            continue
        start = time.perf_counter()
        found[part] = MEASURES[part](options)
        gc.collect()
        print(f"{part} ({time.perf_counter() - start:.0f} s)", flush=True)
        for name, row in found[part].items():
            said = (
                row if not isinstance(row, dict) else "; ".join(f"{k} {v}" for k, v in row.items())
            )
            print(f"  {name:26} {said}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
