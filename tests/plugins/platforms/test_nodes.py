"""Staying on one memory node."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from modulm.config import EngineConfig
from modulm.config.binding import binding_of
from modulm.contracts.platform import Binding
from modulm.errors import ConfigError
from modulm_platform_cpu.nodes import read_nodes, settle

TWO = {0: frozenset({0, 1, 2}), 1: frozenset({3, 4})}
ALL = frozenset(range(5))


@pytest.fixture
def folder(tmp_path):
    for name, cores in (("node0", "0-1,4\n"), ("node1", "2-3\n"), ("node2", "\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores)
    (tmp_path / "online").write_text("0-2")
    return tmp_path


def test_nodes_are_read(folder):
    assert read_nodes(folder) == {0: {0, 1, 4}, 1: {2, 3}, 2: frozenset()}
    assert read_nodes(folder / "node2") == {}


@pytest.mark.parametrize(
    ("binding", "allowed", "settled"),
    [
        (Binding(), ALL, Binding((0, 1, 2), (0,))),
        (Binding(), {2, 3, 4}, Binding((3, 4), (1,))),
        (Binding(nodes=(1,)), ALL, Binding((3, 4), (1,))),
        (Binding(cpus=(2, 3)), ALL, Binding((2, 3), (0, 1))),
        (Binding(cpus=(4,), nodes=(0,)), ALL, Binding((4,), (0,))),
    ],
)
def test_what_is_left_open_is_settled(binding, allowed, settled):
    assert settle(binding, TWO, frozenset(allowed)) == settled


@pytest.mark.parametrize(
    ("binding", "allowed", "message"),
    [
        (Binding(nodes=(2,)), ALL, "numa_bind_nodes.*node 2 does not exist; available nodes: 0, 1"),
        (Binding(cpus=(9,)), ALL, "numa_bind_cpus.*core 9"),
        (Binding(nodes=(1,)), {0}, "no core of the node"),
    ],
)
def test_what_is_not_there_is_refused(binding, allowed, message):
    with pytest.raises(ConfigError, match=message):
        settle(binding, TWO, frozenset(allowed))


@pytest.mark.parametrize(
    ("flags", "binding"),
    [
        ({}, None),
        ({"numa_bind": True}, Binding()),
        ({"numa_bind_nodes": [1]}, Binding(nodes=(1,))),
        ({"numa_bind_cpus": ["0-2,5"]}, Binding(cpus=(0, 1, 2, 5))),
    ],
)
def test_flags_say_where(flags, binding):
    assert binding_of(EngineConfig.from_keywords(**flags).device) == binding


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"numa_bind_nodes": [0, 1]}, "numa_bind_nodes.*2 entries for 1 worker"),
        ({"numa_bind_cpus": ["0-x"]}, "numa_bind_cpus.*'0-x' is not a list of cores"),
    ],
)
def test_wrong_flags_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        binding_of(EngineConfig.from_keywords(**flags).device)


@pytest.mark.exhaustive
def test_a_process_stays_on_its_core():
    """In a process of its own: nobody else is to be bound."""
    core = min(os.sched_getaffinity(0))
    program = (
        "import os, threading\n"
        "from modulm.contracts.platform import Binding\n"
        "from modulm_platform_cpu.platform import CpuPlatform\n"
        f"CpuPlatform().bind(Binding(cpus=({core},)))\n"
        "seen = []\n"
        "thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))\n"
        "thread.start(); thread.join(); print(seen)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if "refused to bind memory" in done.stderr:
        pytest.skip("this system forbids set_mempolicy")
    assert done.stdout == f"[{{{core}}}]\n", done.stderr
