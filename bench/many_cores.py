"""What machines with many cores would do, computed from parts that were measured on small ones.

    python bench/many_cores.py

A node (NUMA) has cores and memory of its own. For each machine and model the rates of one stream
and of 256 streams of 1,024 tokens are computed in three arrangements: one process on one node,
ranks of one model on all nodes (`--tensor-parallel-size NODES --numa-bind-nodes 0 1 ...`), and a
replica on each node. A step takes the longer of reading (weights, keys and values) and of
multiplying, then the sums between ranks, then what the engine does per step and per row. Nothing
here was measured on such a machine: docs/many-cores.md says what to measure first.
"""

from __future__ import annotations

from attrs import frozen

#: Shares of a node's bandwidth and of its product rate that steps reach (bench/decode.py).
READING, MULTIPLYING = 0.9, 0.85
#: Seconds of a sum of one row over two ranks (bench/parallel.py); with more, each reads all others'
#: parts. Of many rows, each rank reads its share from all and then all shares: at this share of a
#: node's bandwidth, since most lies in other nodes (assumed, not measured).
SUM, FAR = 4.4e-6, 0.5
#: Seconds of a step and of a row of it outside the model (bench/growth.py, bench/step_overhead.py).
STEP, ROW = 150e-6, 1e-6
STREAMS, CONTEXT = 256, 1024


@frozen
class Machine:
    """read: GB/s of a node. product: GFLOP/s of a core in bf16, measured where the comment says."""

    name: str
    nodes: int
    cores: int
    read: float
    product: float


@frozen
class Model:
    """hidden: size of a hidden state. active, all: GB of weights that one row and many rows read.
    kv: bytes per token.
    """

    name: str
    layers: int
    hidden: int
    active: float
    all: float
    kv: float


MACHINES = (
    # 8 channels of DDR4-3200; the product rate of a Zen 3 core (results/2026-11-28-avx2.md).
    Machine("64 cores, AVX2, 4 nodes", 4, 16, 51, 82),
    # Two sockets of 12 channels of DDR5-4800; half of what a Zen 5 core multiplies, which has units
    # of twice the width.
    Machine("192 cores, AVX512-BF16, 8 nodes", 8, 24, 115, 107),
)
MODELS = (
    Model("0.6B", 28, 1024, 1.19, 1.19, 114_688),
    Model("8B", 36, 4096, 16.4, 16.4, 147_456),
    Model("30B-A3B", 48, 2048, 6.7, 61.1, 98_304),
)


def step(machine: Machine, model: Model, rows: int, ranks: int) -> float:
    """Seconds of a step of `rows` on `ranks` nodes."""
    weights = model.active if rows == 1 else model.all
    read = (weights * 1e9 + rows * CONTEXT * model.kv) / (machine.read * 1e9 * READING)
    products = rows * model.active * 1e9 / (machine.cores * machine.product * 1e9 * MULTIPLYING)
    sums = 0.0
    if ranks > 1:
        moved = 2 * rows * model.hidden * 2
        sums = 2 * model.layers * (SUM / 2 * ranks + moved / (machine.read * 1e9 * FAR))
    return max(read, products) / ranks + sums + STEP + rows * ROW


def rates(machine: Machine, model: Model) -> list[float]:
    """Tokens/s: one stream on one node and on all; many streams in ranks and in replicas."""
    nodes = machine.nodes
    return [
        1 / step(machine, model, 1, 1),
        1 / step(machine, model, 1, nodes),
        STREAMS / step(machine, model, STREAMS, nodes),
        STREAMS / step(machine, model, STREAMS // nodes, 1),
    ]


def table() -> list[str]:
    """The lines of a markdown table."""
    many = f"{STREAMS} streams"
    lines = [
        f"| machine | model | one stream: one node | ranks | {many}: ranks | replicas |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for machine in MACHINES:
        for model in MODELS:
            found = " | ".join(f"{rate:,.0f}" for rate in rates(machine, model))
            lines.append(f"| {machine.name} | {model.name} | {found} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
