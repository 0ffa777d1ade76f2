"""Perplexity of the embedded model for every scheme and method of `modulm quantize`.

    python bench/quantize.py [--model NAME] [--samples N] [--length N] [--groups N...]
                             [--only TEXT] [--json FILE]

Each line is a run of the command, with the command's own evaluation: the engine runs the written
folder on a quarter of the model's conversations, which are excluded from calibration. `--groups`
are group sizes of 4-bit codes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import tempfile
import time
from pathlib import Path

from modulm_command_quantize.command import command
from modulm_command_quantize.schemes import SCHEMES

METHODS = ("rtn", "gptq", "awq")
_FOUND = re.compile(r"perplexity: ([\d.]+) before, ([\d.]+) after")


def runs(sizes: list[int]) -> list[tuple[str, list[str]]]:
    """Name of each line, and the options of its scheme."""
    found = []
    for scheme in SCHEMES.values():
        for group in sizes if scheme.group else (None,):
            sized = [] if group is None else ["--group-size", str(group)]
            name = scheme.name if group is None else f"{scheme.name}, groups of {group}"
            found.append((name, ["--scheme", scheme.name, *sized]))
    return found


def measure(model: str, options: list[str]) -> tuple[float, float, float]:
    """Return (perplexity before, perplexity after, seconds) of one run."""
    shown = io.StringIO()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(shown):
        command.main([model, str(Path(place) / "out"), *options], standalone_mode=False)
    seconds = time.perf_counter() - started
    found = _FOUND.search(shown.getvalue())
    if found is None:
        raise SystemExit(f"{' '.join(options)}: {shown.getvalue()}")
    return float(found[1]), float(found[2]), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--groups", type=int, nargs="+", default=[128])
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    calibration = ["--samples", str(given.samples), "--length", str(given.length)]
    rows = []
    print(f"| scheme | {' | '.join(METHODS)} |\n|---|{'---|' * len(METHODS)}", flush=True)
    for name, options in runs(given.groups):
        if given.only not in name:
            continue
        shown = []
        for method in METHODS:
            before, after, seconds = measure(
                given.model, [*options, "--method", method, *calibration]
            )
            rows.append({"scheme": name, "method": method, "before": before, "after": after,
                         "seconds": seconds})  # fmt: skip
            shown.append(f"{after:.4f} ({after / before:.4f})")
        print(f"| {name} | {' | '.join(shown)} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
