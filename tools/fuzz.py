"""Run the property tests with new examples, round after round, until one fails or time is up.

Each round prints its seed; `make fuzz SEED=n` repeats that round. Unknown options are passed to
pytest.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: pytest's exit codes.
PASSED, FAILED = 0, 1


def command(seed: int, more: list[str]) -> list[str]:
    """Return the command for one round of all property tests."""
    return [
        sys.executable, "-m", "pytest", "-m", "property", "-q", "--maxfail=1",
        "-p", "no:cacheprovider", f"--hypothesis-seed={seed}", *more,
    ]  # fmt: skip


def play(seed: int, more: list[str], left: float | None) -> int | None:
    """Run a round. Returns its exit code, or None if it did not finish within `left` seconds."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    process = subprocess.Popen(
        command(seed, more), cwd=ROOT, env={**environment, "MODULM_FUZZ": str(seed)}
    )
    try:
        return process.wait(left)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return FAILED if process.wait() == FAILED else None


def main() -> int:
    """Return 0 if nothing failed, else pytest's exit code of the failed round."""
    parser = argparse.ArgumentParser(description="property tests with new examples")
    parser.add_argument("--seconds", type=float, default=300, help="duration (300)")
    parser.add_argument(
        "--seed", type=int, help="run only the round with this seed, without a time limit"
    )
    options, more = parser.parse_known_args()
    end = time.monotonic() + options.seconds
    rounds = 0
    while True:
        seed = random.randrange(1 << 32) if options.seed is None else options.seed
        print(f"fuzz: round {rounds + 1}, seed {seed}", flush=True)
        code = play(seed, more, None if options.seed is not None else end - time.monotonic())
        if code not in (PASSED, None):
            print(f"fuzz: failed; repeat with: make fuzz SEED={seed}")
            return code
        rounds += code == PASSED
        if options.seed is not None or time.monotonic() >= end:
            print(f"fuzz: {rounds} complete rounds passed")
            return 0


if __name__ == "__main__":
    sys.exit(main())
