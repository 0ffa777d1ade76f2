"""The cases of a comparison of engines, and their timing.

Each engine has a script in this folder that runs in the engine's own environment, so this module
imports only the standard library. A script calls `main(load)`; `load(checkpoint, weights)` returns
`engine(case)`, which returns `generate(prompts, new)`: it extends lists of token ids greedily by
exactly `new` tokens each. The engine stays loaded and measures a case once per request, so that
engines can take turns.

Decode rates are differences between two runs, to exclude the prompt. Prompts are new in each
repetition, so that a prefix cache has only the intended hits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

Generate = Callable[[list[list[int]], int], None]
Engine = Callable[[str], Generate]
Load = Callable[[str, str], Engine]

VOCABULARY = 8000

#: Maximum length and number of sequences of any case.
LENGTHS = {
    "decode": 256, "prompt": 2112, "streams": 256, "batch": 512, "context": 8448, "prefix": 2112,
}  # fmt: skip
SEQUENCES = {"decode": 1, "prompt": 1, "streams": 16, "batch": 32, "context": 1, "prefix": 1}
LONGEST, MOST = max(LENGTHS.values()), max(SEQUENCES.values())


class Prompts:
    """Random prompts: the same for every engine, different for every case."""

    def __init__(self, case: str) -> None:
        self._random = random.Random(case)

    def one(self, tokens: int) -> list[int]:
        return [self._random.randrange(10, VOCABULARY) for _ in range(tokens)]


def seconds(generate: Generate, prompts: list[list[int]], new: int) -> float:
    began = time.perf_counter()
    generate(prompts, new)
    return time.perf_counter() - began


def decode(generate: Generate, prompts: Prompts, length: int = 32, new: int = 96) -> float:
    """Tokens per second of one stream after a prompt of `length` tokens."""
    prompt = [prompts.one(length)]
    generate(prompt, 1)
    return new / (seconds(generate, prompt, new + 1) - seconds(generate, prompt, 1))


def streams(generate: Generate, prompts: Prompts, new: int = 48) -> float:
    """Tokens per second of 16 streams together, after prompts of 32 tokens."""
    count = SEQUENCES["streams"]
    asked = [prompts.one(32) for _ in range(count)]
    generate(asked, 1)
    return count * new / (seconds(generate, asked, new + 1) - seconds(generate, asked, 1))


def prompt(generate: Generate, prompts: Prompts, length: int = 2048) -> float:
    """Prompt tokens per second up to the first output token."""
    return length / seconds(generate, [prompts.one(length)], 1)


def batch(generate: Generate, prompts: Prompts, requests: int = 32, new: int = 128) -> float:
    """Output tokens per second over simultaneous requests of 256 + 128 tokens."""
    asked = [prompts.one(256) for _ in range(requests)]
    return requests * new / seconds(generate, asked, new)


def context(generate: Generate, prompts: Prompts) -> float:
    """Tokens per second of one stream with a context of 8,192 tokens."""
    return decode(generate, prompts, 8192, 64)


def prefix(generate: Generate, prompts: Prompts) -> float:
    """Time to first token with a cached prefix of 2,000 tokens, relative to an uncached one."""
    head = prompts.one(2000)
    miss = seconds(generate, [head + prompts.one(16)], 1)
    return seconds(generate, [head + prompts.one(16)], 1) / miss


CASES = {
    "decode": decode, "prompt": prompt, "streams": streams, "batch": batch, "context": context,
    "prefix": prefix,
}  # fmt: skip


def main(load: Load) -> None:
    """Load the engine, then answer each line of standard input with a line of standard output.

    A request is {"case": name}, its answer {"figure": number}. The first line, before any request,
    is {"ready": true}. Instead of either, {"refused": reason} says what an engine cannot do. What
    the engine itself prints goes to standard error.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--weights", default="bf16", choices=("bf16", "int8", "int4", "fp8"))
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        engine = load(str(Path(options.checkpoint).resolve()), options.weights)
    except SystemExit as error:
        answer(refused=str(error))
        return
    answer(ready=True)
    current: tuple[str, Generate, Prompts] | None = None
    for line in sys.stdin:
        case = json.loads(line)["case"]
        try:
            if current is None or current[0] != case:
                current = None  # frees what the last case held
                current = case, engine(case), Prompts(case)
                current[1]([current[2].one(16)], 4)
            answer(figure=CASES[case](*current[1:]))
        except (Exception, SystemExit) as error:
            answer(refused=f"{type(error).__name__}: {error}")
