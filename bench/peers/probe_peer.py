"""The machine's peaks in a comparison: each request is answered with GB/s and GFLOP/s.

In a process of its own, so that its threads are stopped while engines run (see engines.py).
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from probe import gemm_rate

import modulm_kernels_cpu as kernels
from modulm_kernels_cpu.probe import ReadProbe

#: Passes of reading, and seconds of products.
PASSES, SECONDS = 5, 0.3


def main() -> None:
    probe = ReadProbe(kernels.load())
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        read = max(probe.rate() for _ in range(PASSES))
        print(json.dumps({"read": read, "gemm": gemm_rate(seconds=SECONDS)}), flush=True)


if __name__ == "__main__":
    main()
