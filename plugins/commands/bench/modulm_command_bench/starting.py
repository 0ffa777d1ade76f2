"""`modulm bench startup`: how long an engine takes to start, in processes of its own.

Cold starts have empty caches of compiled kernels and packed weights; warm ones have the user's. The
operating system's cache of files is not emptied.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from modulm.config.environ import isolated
from modulm_wire.frames import pack_config, unpack_config
from modulm_wire.packing import decode, encode

if TYPE_CHECKING:
    from modulm.config import EngineConfig

__all__ = ["startup"]

_CHILD = "from modulm_command_bench.starting import start_once; start_once()"
_PERCENTILES = (10, 25, 50, 75, 90, 99)


def startup(config: EngineConfig, *, cold: int, warmups: int, warm: int) -> dict[str, Any]:
    """Start engines one after the other; returns times in seconds, with vLLM's names."""
    packed = encode(pack_config(config))
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="modulm-bench-") as folder:
        for number in range(cold):
            empty = f"{folder}/{number}"
            caches = {"XDG_CACHE_HOME": empty, "TRITON_CACHE_DIR": f"{empty}/triton"}
            _add(results, "cold", _start(packed, caches))
    for _ in range(warmups):
        _start(packed, {})
    for _ in range(warm):
        _add(results, "warm", _start(packed, {}))
    for kind in ("cold", "warm"):
        times = results.get(f"{kind}_startup_times")
        if times:
            spread = {str(q): float(np.percentile(times, q)) for q in _PERCENTILES}
            results[f"avg_{kind}_startup_time"] = float(np.mean(times))
            results[f"{kind}_startup_percentiles"] = spread
            engine = float(np.mean(results[f"{kind}_engine_times"]))
            click.echo(
                f"{kind} start: {np.mean(times):.2f} s on average, from {min(times):.2f} to "
                f"{max(times):.2f} s; {engine:.2f} s of it in the engine"
            )
    return results


def _add(results: dict[str, Any], kind: str, times: tuple[float, float]) -> None:
    whole, engine = times
    results.setdefault(f"{kind}_startup_times", []).append(whole)
    results.setdefault(f"{kind}_engine_times", []).append(engine)


def _start(packed: bytes, variables: Mapping[str, str]) -> tuple[float, float]:
    """Start an engine in a process; returns seconds until it is ready: of the process, and of the
    engine in it. Raises click.ClickException with the process's last line.
    """
    began = perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**isolated(), **variables},
    )  # fmt: skip
    output, errors = child.communicate(packed)
    seconds = perf_counter() - began
    lines = output.decode(errors="replace").splitlines()
    ready = [line.split()[1:] for line in lines if line.startswith("ready ")]
    if child.returncode or not ready:
        last = (errors.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise click.ClickException(f"the engine did not start: {last}")
    engine, closing = map(float, ready[-1])
    return seconds - closing, engine


def start_once() -> None:
    """Start the engine whose packed configuration is on standard input; in the child."""
    began = perf_counter()
    from modulm_frontend.llm import LLM

    config = unpack_config(decode(sys.stdin.buffer.read()))
    engine = LLM.from_config(config)
    ready = perf_counter()
    engine.shutdown()
    sys.stdout.write(f"ready {ready - began} {perf_counter() - ready}\n")
