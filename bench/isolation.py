"""What a call of a plugin costs in a process of its own (`--isolate`), against in the same process.

    python bench/isolation.py

Prints a Markdown table: microseconds per call, and the ratio. Each figure is the fastest of its
calls, which alternate: what a call costs while nothing else wants the processors.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from modulm.config import EngineConfig
from modulm.contracts.parser import ParseContext
from modulm.contracts.sampling import RowView, SamplingParams
from modulm.plugins import PluginManager
from modulm.plugins.selection import Selection
from modulm_isolation.process import close_all

TERMS = "~modulm-parser-hermes:timeout=60,~modulm-logits-dry:timeout=60"


def microseconds(call: Callable[[], object]) -> float:
    """The time of a call."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def parser_call(manager: PluginManager) -> Callable[[], object]:
    """Feeding one token's text."""
    parser = manager.load("tool_parsers", "hermes")(ParseContext())
    return lambda: parser.feed(" word")


def logits_call(manager: PluginManager, vocabulary: int, rows: int) -> Callable[[], object]:
    """A step with `rows` rows."""
    cls = manager.load("logits_processors", "dry")
    processor = cls.open(EngineConfig(), vocabulary, torch.device("cpu"))
    params = SamplingParams(extra_args={"dry_multiplier": 0.8}, seed=1)
    views = [RowView(row, params, list(range(64)), list(range(32))) for row in range(rows)]
    for view in views:
        processor.admit(view)
    logits = torch.zeros(rows, vocabulary)
    return lambda: processor.apply(views, logits, range(rows))


def main() -> None:
    """Measure and print."""
    here, apart = PluginManager(), PluginManager(Selection.parse(TERMS))
    cases = {
        "tool parser: `feed` of a token": (parser_call, (), 4000),
        "logits processor: a row of 32,000": (logits_call, (32_000, 1), 800),
        "logits processor: a row of 128,000": (logits_call, (128_000, 1), 500),
        "logits processor: 8 rows of 128,000": (logits_call, (128_000, 8), 120),
    }
    print("| call | same process, µs | own process, µs | ratio | difference, µs |")
    print("|---|---|---|---|---|")
    for name, (make, arguments, repeats) in cases.items():
        calls = [make(manager, *arguments) for manager in (here, apart)]
        rounds = [[microseconds(call) for call in calls] for _ in range(repeats)]
        same, own = (min(column) for column in zip(*rounds, strict=True))
        print(f"| {name} | {same:.1f} | {own:.0f} | {own / same:.1f} | {own - same:.0f} |")
    close_all()


if __name__ == "__main__":
    main()
